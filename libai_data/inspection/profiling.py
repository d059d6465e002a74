"""Measuring a loader with different numbers of workers, and what follows from it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable

from libai_data.global_batch.plan import ReadPlan
from libai_data.parallel_mesh import ParallelMesh

STAGES = ("source", "transform", "copy")

_GOOD_ENOUGH = 0.95
"""The fewest workers that reach this share of the best rate are recommended: each costs memory."""

_WARM_UP_BATCHES = 2


@dataclass(frozen=True)
class Measurement:
    """One run of a loader.

    Args:
        workers: processes that read.
        rate: samples a second, without the time until the first batches.
        seconds: of each stage, over all workers, for one sample.
        bottleneck: the stage in which most of the work lies; as `loader.stats()` tells it.
    """

    workers: int
    rate: float
    seconds: Sequence[float]
    bottleneck: str


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def worker_counts(most: int) -> list[int]:
    """0 to `most` workers; of the numbers above 8 only every doubling, and `most` itself."""
    doubling = [2**power for power in range(4, most.bit_length())]
    return sorted({*range(min(most, 8) + 1), *(count for count in doubling if count < most), most})


def measure(
    loader: Any,
    workers: int,
    seconds: float,
    rows_of: Callable[[Any], int],
    clock: Callable[[], float] = time.perf_counter,
) -> Measurement:
    """Take batches as fast as they come.

    Args:
        loader: an endless one, with `stats()`.
        workers: that it has.
        seconds: to measure; at least one batch is taken.
        rows_of: rows of a batch.
        clock: seconds from any beginning.
    """
    batches = iter(loader)
    for _ in range(_WARM_UP_BATCHES):
        next(batches)
    before = loader.stats()
    rows, start = 0, clock()
    while not rows or clock() - start < seconds:
        rows += rows_of(next(batches))
    taken, after = clock() - start, loader.stats()
    samples = after["samples"] - before["samples"]
    spent = [after[f"{stage}_seconds"] - before[f"{stage}_seconds"] for stage in STAGES]
    costs = [each / samples if samples else 0.0 for each in spent]
    # The trainer computes nothing here, so that it is never the one that others wait for.
    bottleneck = STAGES[max(range(len(STAGES)), key=costs.__getitem__)]
    return Measurement(workers, rows / taken, costs, bottleneck)


@dataclass(frozen=True)
class Recommendation:
    """What to set.

    Args:
        workers: of each rank that reads.
        readers: who reads; None to leave it as it is.
        reasons: in words.
    """

    workers: int
    readers: str = ""
    reasons: Sequence[str] = ()

    def overrides(self) -> list[str]:
        """The setting, as `key=value` of a config."""
        readers = [f"dataloader.train.readers={self.readers}"] if self.readers else []
        return [f"dataloader.train.num_workers={self.workers}", *readers]


def recommend(
    measurements: Sequence[Measurement], mesh: ParallelMesh, readers: str = "data_parallel"
) -> Recommendation:
    """Choose the number of workers, and who reads.

    Args:
        measurements: of one loader, at least one.
        mesh: of the training; all of a node's ranks share the cores that were measured.
        readers: who reads now.
    """
    best = max(measurements, key=lambda each: each.rate)
    enough = min(
        (each for each in measurements if each.rate >= _GOOD_ENOUGH * best.rate), key=lambda each: each.workers
    )
    reasons = [
        f"{enough.workers} worker(s) reach {enough.rate:,.0f} samples/s, {enough.rate / best.rate:.0%} of the best "
        f"({best.workers}: {best.rate:,.0f})."
    ]
    plan = ReadPlan(mesh, readers)
    wanted = ""
    shards = len(plan.shards_of_node(0))
    if readers == "data_parallel" and mesh.ranks_per_node > shards:
        wanted = "node"
        reasons.append(
            f"{mesh.ranks_per_node} ranks of a node need only {shards} different part(s) of each batch: with "
            "readers=node, each sample is read once instead of by every rank."
        )
    reading = sum(bool(ReadPlan(mesh, wanted or readers).shards_read_by(rank)) for rank in plan.ranks_of(0))
    workers = -(-enough.workers // reading)
    if reading > 1:
        reasons.append(f"{reading} ranks of a node read, and share its cores: {workers} worker(s) each.")
    stage = best.bottleneck
    cost = best.seconds[STAGES.index(stage)]
    reasons.append(f"Most of a worker's time goes into '{stage}': {cost * 1e6:,.0f} microseconds a sample.")
    return Recommendation(workers, wanted, reasons)
