"""Seconds spent in each stage: readers count them, and the loader adds them up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class StageTimes:
    """Seconds spent reading samples, over all workers."""

    source: float = 0.0  # in the dataset, without its transforms
    transform: float = 0.0  # in transforms that the dataset marks with `transform_time`
    copy: float = 0.0  # writing samples into their batch
    idle: float = 0.0  # workers waiting for tasks, that is, for the trainer to ask for batches
    samples: int = 0  # how many samples were read

    @property
    def busy(self) -> float:
        """Seconds of work."""
        return self.source + self.transform + self.copy

    def add(self, other: StageTimes) -> None:
        """Add another's seconds to these."""
        self.source += other.source
        self.transform += other.transform
        self.copy += other.copy
        self.idle += other.idle
        self.samples += other.samples


NO_TIMES = StageTimes()
"""Times of a result that has none; never changed."""


@dataclass
class LoaderTimes:
    """Seconds of the trainer's thread: waiting for batches within the loader, and busy between two batches."""

    waiting: float = 0.0
    between: float = 0.0
    batches: int = 0

    def waiting_share(self) -> float:
        """Share of the time that the trainer waited for data; 0 before the first batch."""
        total = self.waiting + self.between
        return self.waiting / total if total else 0.0


def summary(stages: StageTimes, loader: LoaderTimes) -> dict[str, Any]:
    """The figures of `loader.stats()`."""
    return {
        "batches": loader.batches,
        "samples": stages.samples,
        "source_seconds": stages.source,
        "transform_seconds": stages.transform,
        "copy_seconds": stages.copy,
        "waiting_for_workers_seconds": loader.waiting,
        "waiting_for_trainer_seconds": stages.idle,
        "waiting_share": loader.waiting_share(),
        "bottleneck": _bottleneck(stages, loader),
    }


def _bottleneck(stages: StageTimes, loader: LoaderTimes) -> str:
    if loader.waiting_share() < 0.1:
        return "trainer"
    return max(("source", stages.source), ("transform", stages.transform), ("copy", stages.copy), key=lambda s: s[1])[0]
