"""A loader that keeps every promise, and others that each break one, as published ones have."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

GLOBAL_BATCH = 8


class Exact:
    """Shuffled batches of one epoch; rank r takes its part of each global batch; the last one may be short.

    Args:
        rank: this rank.
        world: ranks.
        state: of an earlier one, or None.
        samples: length of the dataset.
    """

    def __init__(self, rank: int, world: int, state: dict[str, int] | None, samples: int) -> None:
        self.rank, self.world, self.samples = rank, world, samples
        self.taken = 0
        self.epoch = 0
        if state is not None:
            self.restore(state)

    def restore(self, state: dict[str, int]) -> None:
        self.taken, self.epoch = state["taken"], state["epoch"]

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken, "epoch": self.epoch}

    def order(self) -> list[int]:
        indices = list(range(self.samples))
        random.Random(self.epoch).shuffle(indices)
        return indices

    def batches(self) -> list[Sequence[int]]:
        """This rank's parts of all batches of the epoch."""
        order = self.order()
        return [self.part(order[first : first + GLOBAL_BATCH]) for first in range(0, len(order), GLOBAL_BATCH)]

    def part(self, batch: list[int]) -> Sequence[int]:
        size = GLOBAL_BATCH // self.world
        return batch[self.rank * size : (self.rank + 1) * size]

    def __iter__(self) -> Iterator[Sequence[int]]:
        for batch in self.batches()[self.taken // GLOBAL_BATCH :]:
            self.taken += GLOBAL_BATCH
            yield batch
        self.taken = 0
        self.epoch += 1


class DividesGlobalByPerRank(Exact):
    """Counts samples of all ranks, and divides them by the batch of one."""

    def restore(self, state: dict[str, int]) -> None:
        super().restore(state)
        self.taken = state["taken"] // (GLOBAL_BATCH // self.world) * GLOBAL_BATCH


class RaggedTail(Exact):
    """Each rank cuts its own share of the dataset into batches, and shares differ in length."""

    def batches(self) -> list[Sequence[int]]:
        own, size = self.order()[self.rank :: self.world], GLOBAL_BATCH // self.world
        return [own[first : first + size] for first in range(0, len(own), size)]


class CountsPadding(Exact):
    """Fills the last batch up with first samples that nobody marks."""

    def order(self) -> list[int]:
        order = super().order()
        return order + order[: -len(order) % GLOBAL_BATCH]


class DependsOnTheWorld(Exact):
    """Each rank shuffles a part of the dataset of its own."""

    def batches(self) -> list[Sequence[int]]:
        size = GLOBAL_BATCH // self.world
        share = -(-self.samples // self.world)
        own = list(range(self.rank * share, min((self.rank + 1) * share, self.samples)))
        random.Random(self.epoch).shuffle(own)
        return [own[first : first + size] for first in range(0, share, size)]


class CountsPrefetched(Exact):
    """Its state is that of the reader, which is a batch ahead of the training."""

    def __iter__(self) -> Iterator[Sequence[int]]:
        ahead: list[Sequence[int]] = []
        for batch in super().__iter__():
            ahead.append(batch)
            if len(ahead) == 2:
                yield ahead.pop(0)
        yield from ahead


class DropsTheTail(Exact):
    """Leaves the last batch out unless it is full."""

    def batches(self) -> list[Sequence[int]]:
        return super().batches()[: self.samples // GLOBAL_BATCH]


class ShortEpochAfterResume(Exact):
    """After a resume, each epoch begins where the resumed one did."""

    first = 0

    def restore(self, state: dict[str, int]) -> None:
        super().restore(state)
        self.first = self.taken

    def __iter__(self) -> Iterator[Sequence[int]]:
        yield from super().__iter__()
        self.taken = self.first


class WorkerCountChangesOrder(Exact):
    """Each worker reads every other batch, and those of the first worker come first."""

    def __init__(self, rank: int, world: int, state: Any, samples: int, workers: int) -> None:
        super().__init__(rank, world, state, samples)
        self.workers = max(1, workers)

    def batches(self) -> list[Sequence[int]]:
        batches = super().batches()
        return [batch for worker in range(self.workers) for batch in batches[worker :: self.workers]]
