"""The data state: how long restoring takes at step 10^6, and how large the state is."""

from __future__ import annotations

import json
import time
from functools import partial
from statistics import median
from typing import Any, Callable

import numpy as np

from libai_data import DataLoader
from libai_data.data.datasets import BlendedDataset, FilteredDataset, PackedDataset
from libai_data.data.samplers import CyclicSampler, StepSchedule
from tools.benchmarks.rows import AtMost, Row, Scale, contender

STEP, LANES = 10**6, 64
IN_LANES = ("samples", "blend", "filter", "packs", "whole packs")
SAMPLES = 10**8
BATCH = 512
TIMES = 100

Make = Callable[[], DataLoader]


class _Numbers:
    """As many samples as one likes, in shards of 10,000."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples
        self.shard_lengths = np.full(samples // 10_000, 10_000)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"number": index}


def rows(scale: Scale) -> list[Row]:
    """The rows of the state's suite."""
    plain = {"plain": _plain, "ramp and skips": _with_ramp_and_skips}
    laned = {f"{kind} in {LANES} lanes": partial(_in_lanes, kind) for kind in IN_LANES}
    kinds: dict[str, Make] = {**plain, **laned}
    times = tuple(
        contender(name, partial(_restoring, make, 5 if scale.quick else TIMES)) for name, make in kinds.items()
    )
    sizes = tuple(contender(name, partial(_bytes, make)) for name, make in kinds.items())
    return [
        Row(
            "restore",
            "load the state at step 10^6 of 10^8 samples, and find the first batch",
            "0",
            times,
            tuple(AtMost(name, 20 if name in laned else 2, "ms") for name in kinds),
        ),
        Row(
            "size",
            "the same state, as JSON",
            "0",
            sizes,
            tuple(AtMost(name, 1023 + 64 * LANES * (name in laned), "bytes") for name in kinds),
        ),
    ]


def _plain() -> DataLoader:
    return _following(StepSchedule(((0, BATCH),)), ())


def _with_ramp_and_skips() -> DataLoader:
    ramp = tuple((step * 10_000, BATCH // 16 * (step + 1)) for step in range(16))
    return _following(StepSchedule(ramp), tuple((step * 50_000, step * 50_000 + 50) for step in range(1, 9)))


def _following(schedule: StepSchedule, skips: Any) -> DataLoader:
    dataset = _Numbers()
    loader = DataLoader(dataset, CyclicSampler(dataset, schedule.sizes[0][1], shuffle=True, seed=1234))
    loader.follow(schedule, skips)
    return loader


def _in_lanes(kind: str) -> DataLoader:
    few = SAMPLES // 10
    dataset: Any = _Numbers()
    if kind == "blend":
        dataset = BlendedDataset([_Numbers(), _Numbers(few), _Numbers(few)], [5, 3, 2])
    elif kind == "filter":
        dataset = FilteredDataset(_Numbers(few), np.arange(few) % 3 > 0)
    elif kind != "samples":
        lengths = np.arange(few, dtype=np.int32) * 7919 % 1000 + 1
        dataset = PackedDataset(_Numbers(few), 2048, lengths=lengths, cut=kind == "packs")
    loader = DataLoader(dataset, CyclicSampler(dataset, BATCH, shuffle=True, seed=1234, lanes=LANES))
    loader.follow(StepSchedule(((0, BATCH),)), ())
    return loader


def _state(make: Make) -> dict[str, Any]:
    loader = make()
    loader.stream.set_consumed_samples(loader.stream.schedule.position_of(STEP))
    if loader.stream.makes_outputs:
        # As if four samples had made an output; the windows of packs begin at multiples of their size.
        turns = STEP * BATCH * 4 // LANES // loader.dataset.units * loader.dataset.units
        loader.stream.note_start(loader.stream.position, tuple(turns * LANES + turn for turn in range(LANES)))
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return state


def _restoring(make: Make, times: int) -> float:
    """Milliseconds, the median of many."""
    state, taken = _state(make), []
    for _ in range(times):
        loader = make()
        start = time.perf_counter()
        loader.load_state_dict(state)
        loader.stream.batch_at(loader.stream.position)
        taken.append(time.perf_counter() - start)
    return 1000 * median(taken)


def _bytes(make: Make) -> float:
    return float(len(json.dumps(_state(make))))
