"""The weights of a blend change where a step begins, whatever the sizes of steps are; nothing is lost or repeated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai_data.data.datasets import BlendedDataset, FilteredDataset
from libai_data.data.samplers import BlendOrder, CyclicSampler, Ledger, Order, StepSchedule
from libai_data.data.samplers.schedule import Ranges
from libai_data.errors import CheckpointError, ConfigError
from tests.data.samplers.step_runs import steps_from
from tests.data.samplers.test_blend_order import Numbers
from tests.properties import examples

SIZES = (10, 20, 30)
BEFORE, AFTER = [1, 2, 3], [3, 2, 1]
CHANGES = {5: AFTER, 9: [0, 1, 1]}


def blend(changes: Any = None, weights: Sequence[float] = BEFORE) -> BlendedDataset:
    datasets = [Numbers(size, number) for number, size in enumerate(SIZES)]
    return BlendedDataset(datasets, weights, changes_at_steps=CHANGES if changes is None else changes)


def ranks_of(
    schedule: StepSchedule, skips: Ranges = (), ranks: int = 1, dataset: Any = None, batches: int = 1
) -> list[CyclicSampler]:
    first = schedule.sizes[0][1]
    made = [
        CyclicSampler(dataset or blend(), first // ranks // batches, True, 0, rank, ranks, seed=1)
        for rank in range(ranks)
    ]
    for rank in made:
        rank.follow(schedule, skips, {size: batches for _, size in schedule.sizes})
    return made


def counted(step: Sequence[Any]) -> np.ndarray:
    """Samples of each dataset in a step."""
    numbers = np.searchsorted(np.cumsum(SIZES), [index for _, index in step], side="right")
    return np.bincount(numbers, minlength=len(SIZES))


def check_weights(steps: Sequence[Any], changes: Mapping[int, Sequence[float]]) -> None:
    """Since each change, each prefix has the proportions; the samples of each dataset go on in its own order."""
    shares = np.array(BEFORE) / sum(BEFORE)
    since = np.zeros(len(SIZES))
    for number, step in enumerate(steps):
        if number in changes:
            shares, since = np.array(changes[number]) / sum(changes[number]), np.zeros(len(SIZES))
        since = since + counted(step)
        assert (np.abs(since - shares * since.sum()) < 1).all(), number


def check_nothing_is_lost(steps: Sequence[Any], order: Any) -> None:
    assert isinstance(order, BlendOrder)
    taken = [sample for step in steps for sample in step]
    for number, (first, own) in enumerate(order._members):
        mine = [(epoch, index - first) for epoch, index in taken if first <= index < first + SIZES[number]]
        epochs, indices = own.locate(np.arange(len(mine)))
        assert mine == list(zip(epochs.tolist(), indices.tolist()))


@settings(max_examples=examples(25))
@given(
    sizes=st.lists(st.sampled_from([4, 8, 12]), min_size=1, max_size=3),
    ranks=st.sampled_from([1, 2, 4]),
    cut=st.integers(0, 12),
)
def test_weights_change_at_the_step_whatever_the_sizes_and_the_mesh_and_go_on_after_any_step(
    sizes: list[int], ranks: int, cut: int
) -> None:
    schedule = StepSchedule(tuple((4 * number, size) for number, size in enumerate(sizes)))
    whole = list(islice(steps_from(ranks_of(schedule), 0), 14))
    check_weights(whole, CHANGES)
    check_nothing_is_lost(whole, ranks_of(schedule)[0].order)
    others = ranks_of(schedule, ranks=ranks)
    stopped = list(islice(steps_from(others, 0), cut))
    state = json.loads(json.dumps(others[0].state_dict()))
    again = ranks_of(schedule)
    again[0].load_state_dict(state)
    assert [sorted(step) for step in [*stopped, *islice(steps_from(again, cut), 14 - cut)]] == list(map(sorted, whole))


def test_accumulated_batches_are_one_step() -> None:
    schedule = StepSchedule(((0, 8),))
    whole = list(islice(steps_from(ranks_of(schedule), 0), 12))
    in_parts = ranks_of(schedule, batches=2)
    assert list(islice(steps_from(in_parts, 0, {8: 2}), 12)) == whole


def test_steps_that_are_skipped_still_count() -> None:
    schedule = StepSchedule(((0, 6),))
    ranks = ranks_of(schedule, ((2, 3),))
    steps = list(islice(steps_from(ranks, 0), 14))
    shares = np.array(AFTER) / sum(AFTER)
    since = np.sum([counted(step) for step in steps[5:9]], axis=0)
    assert (np.abs(since - shares * since.sum()) < 1).all()
    ledger = Ledger(ranks[0].state)
    for number, step in enumerate(steps):
        assert list(zip(*(each.tolist() for each in ledger.samples_of(number)))) == step


def test_a_resumed_run_with_steps_of_another_size_changes_weights_at_the_same_step() -> None:
    first = ranks_of(StepSchedule(((0, 4),)))
    done = list(islice(steps_from(first, 0), 3))
    second = ranks_of(StepSchedule(((0, 4), (3, 12))))
    second[0].load_state_dict(first[0].state_dict())
    steps = [*done, *islice(steps_from(second, 3), 10)]
    assert [len(step) for step in steps] == [4] * 3 + [12] * 10
    check_weights(steps, CHANGES)
    check_nothing_is_lost(steps, second[0].order)
    # And once more, behind a change, by a config that only knows the new size.
    third = ranks_of(StepSchedule(((0, 12),)))
    third[0].load_state_dict(second[0].state_dict())
    check_weights([*steps, *islice(steps_from(third, 13), 3)], CHANGES)


def test_changes_may_be_told_later_but_not_of_steps_that_are_done() -> None:
    schedule = StepSchedule(((0, 4),))
    saved = ranks_of(schedule, dataset=blend({}))
    list(islice(steps_from(saved, 0), 4))
    state = saved[0].state_dict()
    ranks_of(schedule)[0].load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"weights were .* and are now"):
        ranks_of(schedule, dataset=blend({2: AFTER}))[0].load_state_dict(state)


def test_without_steps_a_batch_is_one() -> None:
    sampler = CyclicSampler(blend(), 4, shuffle=True, seed=1)
    assert [start for start, _ in sampler.order.blend.phases] == [0, 20, 36]  # type: ignore[attr-defined]
    # One round takes every sample once, and an order that is none of a blend is left alone.
    assert type(CyclicSampler(range(9), 4).order) is Order


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"changes": {3: AFTER}, "changes_at_steps": {3: AFTER}}, "at positions and at steps"),
        ({"changes_at_steps": {0: AFTER}}, "change at 0; give a step, an int of at least 1"),
        ({"changes_at_steps": {2: [1, 1]}}, "3 datasets has 2 weights"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BlendedDataset([Numbers(size) for size in SIZES], BEFORE, **arguments)


def test_steps_of_a_stream_transform_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"weights of a blend change at steps.*give positions"):
        CyclicSampler(FilteredDataset(blend(), np.ones(60, bool)), 4)
