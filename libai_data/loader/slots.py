"""Slots: the memory of one batch each, in a list of slots; a slot comes back when the last view of it is gone."""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Callable

import numpy as np

from libai_data.loader.arena import Arena

logger = logging.getLogger(__name__)

_ALIGNMENT = 64


@dataclass(frozen=True)
class ArraySpec:
    """Where an array lies within a slot: name, numpy dtype as text, shape with the batch dim, offset in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def lay_out(arrays: Iterable[tuple[str, np.dtype, Sequence[int]]]) -> tuple[ArraySpec, ...]:
    """Place arrays one behind the other, each on a cache line's border."""
    specs: list[ArraySpec] = []
    end = 0
    for name, dtype, shape in arrays:
        spec = ArraySpec(name, np.dtype(dtype).str, tuple(int(size) for size in shape), end)
        specs.append(spec)
        end = -(-(end + spec.nbytes) // _ALIGNMENT) * _ALIGNMENT
    return tuple(specs)


def bytes_of(specs: Sequence[ArraySpec]) -> int:
    """Bytes that a slot needs for these arrays."""
    return max((spec.offset + spec.nbytes for spec in specs), default=0)


def views(lease: np.ndarray, specs: Sequence[ArraySpec]) -> dict[str, np.ndarray]:
    """The arrays that lie in a slot's bytes."""
    return {spec.name: np.ndarray(spec.shape, _dtype(spec.dtype), lease, spec.offset) for spec in specs}


_dtype = lru_cache(maxsize=None)(np.dtype)


@dataclass
class Slot:
    """Memory of one batch."""

    number: int  # its place in the list of slots
    offset: int  # where it begins in the arena, in bytes
    size: int  # its length in bytes


class SlotList:
    """The slots of one loader.

    Args:
        planned: slots that the loader needs when its user keeps one batch at a time; more are made, and reported once,
            when the user keeps more.
        settle: waits for what uses batches without the user's doing; called before there are more than `planned`.
    """

    def __init__(self, arena: Arena, planned: int = 0, settle: Callable[[], None] = lambda: None) -> None:
        self.arena = arena
        self.planned = planned
        self._settle = settle
        self._settle_above = 0
        self.slots: list[Slot] = []
        self._free: list[int] = []
        # Appended to when views are gone, in whichever thread that happens: append and pop of a deque are atomic.
        self._returned: deque[weakref.ref[np.ndarray]] = deque()
        self._handed_out: dict[int, tuple[weakref.ref[np.ndarray], int]] = {}
        self._reported = False

    def acquire(self, size: int) -> Slot:
        """Take a free slot of at least `size` bytes, or make one."""
        if self._returned:
            self._take_back()
        if not self._free and len(self.slots) >= max(self.planned, self._settle_above):
            self._settle()
            self._take_back()
            # If nothing came back, the user keeps the batches, and it is not worth waiting again soon.
            self._settle_above = 0 if self._free else 2 * len(self.slots)
        if not self._free:
            return self._grow(size)
        # The slot that came back last: its memory is most likely still in the processor's caches.
        slot = self.slots[self._free.pop()]
        if slot.size < size:
            self.move(slot, *self.arena.allocate(size + size // 4))
        return slot

    def move(self, slot: Slot, offset: int, size: int) -> None:
        """Let a slot that is in nobody's hands lie in another range of the arena."""
        self.arena.release(slot.offset, slot.size)
        slot.offset, slot.size = offset, size

    def _grow(self, size: int) -> Slot:
        if len(self.slots) >= self.planned and not self._reported:
            self._reported = True
            logger.warning(
                "More than %d batches are in use at once, so the loader's memory grows by %.1f MB a batch; batches "
                "that you keep stay valid, but copy batches that you keep for long.",
                self.planned,
                size / 1e6,
            )
        slot = Slot(len(self.slots), *self.arena.allocate(size))
        self.slots.append(slot)
        return slot

    def arrays(self, slot: Slot, specs: Sequence[ArraySpec]) -> dict[str, np.ndarray]:
        """Views of a slot for those who fill it."""
        return views(self.arena.lease(slot.offset, slot.size), specs)

    def hand_out(self, slot: Slot, specs: Sequence[ArraySpec]) -> dict[str, np.ndarray]:
        """Views of a slot that comes back to the list of slots when the last of them is gone."""
        lease = self.arena.lease(slot.offset, slot.size)
        # A method of the deque alone keeps no loader alive; and as it is in C, no Ctrl-C that comes while it runs is
        # lost, as it would be in a callback in Python.
        reference = weakref.ref(lease, self._returned.append)
        self._handed_out[id(reference)] = reference, slot.number
        return views(lease, specs)

    def _take_back(self) -> None:
        while self._returned:
            reference = self._returned.popleft()
            held, number = self._handed_out.pop(id(reference), (None, 0))
            if held is reference:  # Else `reclaim` has counted it as free.
                self._free.append(number)

    def reclaim(self) -> None:
        """Count every slot as free of which the user holds no view. Nobody may be writing into a slot."""
        self._handed_out = {key: held for key, held in self._handed_out.items() if held[0]() is not None}
        held = {number for _, number in self._handed_out.values()}
        self._free = [slot.number for slot in self.slots if slot.number not in held]

    def in_use(self) -> int:
        """How many slots are not free."""
        self._take_back()
        return len(self.slots) - len(self._free)

    def give_back(self, slot: Slot) -> None:
        """Return a slot that was never handed out."""
        self._free.append(slot.number)
