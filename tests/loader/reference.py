"""What a loader of any kind does, on one page: no workers, no reading ahead, no memory to share, no ranks."""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional

State = tuple[int, int]
"""Epoch, and rows taken in it; of an endless loader 0, and all rows taken."""


class Expected(NamedTuple):
    """A batch: the epoch of its first row, its rows that count, and all its rows."""

    epoch: int
    counted: list[int]
    size: int


class Ended(Exception):
    """The iterator cannot go on; the loader can be iterated anew."""


class ReferenceLoader:
    """A loader over `samples` samples in batches of `size`; `order(epoch)` gives the indices of an epoch."""

    def __init__(self, order: Callable[[int], list[int]], samples: int, size: int, ends: str, is_stream: bool) -> None:
        self.is_stream = is_stream
        """Only by reading on does it find that nothing is left of an epoch."""
        self.may_be_at_end = False
        self.order, self.samples, self.size, self.ends = order, samples, size, ends
        self.epoch = self.taken = 0
        self.continues = True
        """Whether the next iterator begins here, and not with the next epoch."""
        self.newest = 0
        self.dead: set[int] = set()

    @property
    def state(self) -> State:
        return self.epoch, self.taken

    def load(self, state: State) -> None:
        (self.epoch, self.taken), self.continues = state, True
        self.end_iterators()

    def set_epoch(self, epoch: int) -> None:
        self.load((0, epoch * self.samples) if self.ends == "cycle" else (epoch, 0))

    def end_iterators(self) -> None:
        self.dead.add(self.newest)

    def begin(self) -> int:
        """`iter(loader)`; the number of the iterator."""
        self.end_iterators()
        if self.ends != "cycle" and not (self.continues and (self.is_stream or self.peek() is not None)):
            self.epoch, self.taken = self.epoch + 1, 0
        self.may_be_at_end, self.continues = self.continues and self.taken > 0, False
        self.newest += 1
        return self.newest

    def take(self, iterator: int) -> Optional[Expected]:
        """`next(iterator)`; None for a StopIteration."""
        if iterator in self.dead:
            raise Ended
        if self.may_be_at_end and self.peek() is None:
            self.epoch, self.taken = self.epoch + 1, 0
        self.may_be_at_end = False
        batch = self.peek()
        if batch is None:
            self.epoch, self.taken, self.continues = self.epoch + 1, 0, True
        else:
            self.taken += len(batch.counted)
        return batch

    def peek(self) -> Optional[Expected]:
        """The batch behind the rows that were taken; None at the end of the epoch."""
        if self.ends == "cycle":
            places = [divmod(place, self.samples) for place in range(self.taken, self.taken + self.size)]
            return Expected(places[0][0], [self.order(epoch)[place] for epoch, place in places], self.size)
        counted = self.order(self.epoch)[self.taken : self.taken + self.size]
        if not counted or (self.ends == "drop" and len(counted) < self.size):
            return None
        return Expected(self.epoch, counted, len(counted) if self.ends == "short" else self.size)
