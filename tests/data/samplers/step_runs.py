"""Steps as all ranks of a mesh take them together, and as the definition says they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from libai_data.data.samplers import CyclicSampler, StepSchedule
from libai_data.data.samplers.order import Order
from libai_data.data.samplers.schedule import Ranges

Sample = tuple[int, int]
"""Epoch and index."""


def following(
    size: int,
    schedule: StepSchedule,
    skips: Ranges = (),
    data_parallel_size: int = 1,
    micro_batches: Mapping[int, int] | None = None,
    **arguments: Any,
) -> list[CyclicSampler]:
    """The samplers of all data-parallel ranks, following a schedule."""
    counts = dict(micro_batches or {})
    first = schedule.sizes[0][1]
    micro_batch_size = first // counts.get(first, 1) // data_parallel_size
    ranks = [
        CyclicSampler(range(size), micro_batch_size, True, 0, rank, data_parallel_size, **{"seed": 5, **arguments})
        for rank in range(data_parallel_size)
    ]
    for rank in ranks:
        rank.follow(schedule, skips, counts)
    return ranks


def steps_from(
    ranks: list[CyclicSampler], first_step: int, micro_batches: Mapping[int, int] | None = None
) -> Iterator[list[Sample]]:
    """The samples of one step after the other; each step as a set in the order of the stream."""
    batches = [rank.batches(rank.position) for rank in ranks]
    step = first_step
    while True:
        schedule = ranks[0].schedule
        assert schedule is not None
        count = (micro_batches or {}).get(schedule.size_of(step), 1)
        samples: list[Sample] = []
        for parts in islice(zip(*batches), count):
            assert len({(part.step, part.epoch, part.position, part.size, part.valid) for part in parts}) == 1
            for rank, part in zip(ranks, parts):
                rank.position = part.position + part.size
                samples += zip(part.epochs.tolist(), part.indices.tolist())
        yield samples
        step += 1


def expected_steps(order: Order, schedule: StepSchedule, skips: Ranges, count: int) -> list[list[Sample]]:
    """The definition, place by place: what skipped steps of a run without skips take is left out."""
    uncut, place = [], 0
    for step in range(count + 1 + max((last for _, last in skips), default=0)):
        uncut.append(range(place, place + schedule.size_of(step)))
        place += schedule.size_of(step)
    left_out = {place for first, last in skips for step in range(first, last + 1) for place in uncut[step]}
    steps: list[list[Sample]] = []
    place = 0
    for step in range(count):
        places: list[int] = []
        while len(places) < schedule.size_of(step):
            if place not in left_out:
                places.append(place)
            place += 1
        epochs, indices = order.locate(np.array(places))
        steps.append(list(zip(epochs.tolist(), indices.tolist())))
    return steps
