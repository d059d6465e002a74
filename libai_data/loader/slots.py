"""Slots: each is the memory of one batch; a slot returns to the list of free slots when its last view is gone."""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Callable, NamedTuple

import numpy as np

from libai_data.loader.arena import Arena

logger = logging.getLogger(__name__)

_ALIGNMENT = 64


class ArraySpec(NamedTuple):
    """Where an array is within a slot."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]  # with the batch dim
    offset: int  # in bytes

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def lay_out(arrays: Iterable[tuple[str, np.dtype, Sequence[int]]]) -> tuple[ArraySpec, ...]:
    """Place arrays one after the other, each aligned to a cache line."""
    specs: list[ArraySpec] = []
    end = 0
    for name, dtype, shape in arrays:
        # By its text, `longlong` becomes `int64`, which OneFlow knows.
        spec = ArraySpec(name, np.dtype(dtype.str), tuple(int(size) for size in shape), end)
        specs.append(spec)
        end = -(-(end + spec.nbytes) // _ALIGNMENT) * _ALIGNMENT
    return tuple(specs)


def bytes_of(specs: Sequence[ArraySpec]) -> int:
    """Bytes that a slot needs for these arrays."""
    return max((spec.offset + spec.nbytes for spec in specs), default=0)


def views(lease: np.ndarray, specs: Sequence[ArraySpec]) -> dict[str, np.ndarray]:
    """The arrays in a slot's bytes, uint8 [size]."""
    arrays: dict[str, np.ndarray] = {}
    for name, dtype, shape, offset in specs:  # No comprehension, which would be one more call for each batch.
        arrays[name] = np.ndarray(shape, dtype, lease, offset)
    return arrays


@dataclass
class Slot:
    """Memory of one batch."""

    number: int  # its place in the list of slots
    offset: int  # where it begins in the arena, in bytes
    size: int  # its length in bytes


class SlotList:
    """The slots of one loader.

    Args:
        planned: slots that the loader needs if its user keeps one batch at a time. If the user keeps more batches,
            more slots are made, with one warning.
        settle: waits for queued work that still uses batches; called before there are more than `planned` slots.
    """

    def __init__(self, arena: Arena, planned: int = 0, settle: Callable[[], None] = lambda: None) -> None:
        self.arena = arena
        self.planned = planned
        self._settle = settle
        self._settle_above = 0
        self.slots: list[Slot] = []
        self._free: list[int] = []
        # Callbacks append to it when views are gone, in any thread: append and pop of a deque are atomic.
        self._returned: deque[weakref.ref[np.ndarray]] = deque()
        self._handed_out: dict[int, tuple[weakref.ref[np.ndarray], int]] = {}
        self._reported = False

    def acquire(self, size: int) -> Slot:
        """Get a free slot of at least `size` bytes, or make one."""
        if self._returned:
            self._collect_returned()
        if not self._free and len(self.slots) >= max(self.planned, self._settle_above):
            self._settle()
            self._collect_returned()
            # If no slot became free, the user keeps the batches. Then waiting again soon does not help.
            self._settle_above = 0 if self._free else 2 * len(self.slots)
        if not self._free:
            return self._grow(size)
        # The slot that became free last: its memory is most likely still in the processor's caches.
        slot = self.slots[self._free.pop()]
        if slot.size < size:
            place = self.arena.allocate(size + size // 4)
            self.arena.release(slot.offset, slot.size)
            slot.offset, slot.size = place
        return slot

    def _grow(self, size: int) -> Slot:
        if len(self.slots) >= self.planned and not self._reported:
            self._reported = True
            logger.warning(
                "More than %d batches are in use at once, so the loader's memory grows by %.1f MB per batch. Batches "
                "that you keep stay valid, but copy the batches that you keep for long.",
                self.planned,
                size / 1e6,
            )
        slot = Slot(len(self.slots), *self.arena.allocate(size))
        self.slots.append(slot)
        return slot

    def arrays(self, slot: Slot, specs: Sequence[ArraySpec]) -> dict[str, np.ndarray]:
        """Views of a slot, to write to. They do not count for whether the slot is free."""
        return views(self.arena.lease(slot.offset, slot.size), specs)

    def hand_out(self, slot: Slot, specs: Sequence[ArraySpec]) -> dict[str, np.ndarray]:
        """Views of a slot, for the user; when the last view is gone, the slot becomes free."""
        lease = self.arena.lease(slot.offset, slot.size)
        # The deque's own method keeps no loader alive. It is in C, so a Ctrl-C that comes while it runs is not lost, as
        # it would be in a callback in Python.
        reference = weakref.ref(lease, self._returned.append)
        self._handed_out[id(reference)] = reference, slot.number
        return views(lease, specs)

    def copied(self, arrays: Mapping[str, np.ndarray]) -> tuple[Slot, tuple[ArraySpec, ...], dict[str, np.ndarray]]:
        """Copy arrays into a slot; returns the slot, where each array is within it, and `hand_out` of both."""
        specs = lay_out((name, array.dtype, array.shape) for name, array in arrays.items())
        slot = self.acquire(bytes_of(specs))
        copies = self.hand_out(slot, specs)
        for name, array in arrays.items():
            copies[name][...] = array
        return slot, specs, copies

    def _collect_returned(self) -> None:
        while self._returned:
            reference = self._returned.popleft()
            held, number = self._handed_out.pop(id(reference), (None, 0))
            if held is reference:  # Otherwise, `reclaim` has counted the slot as free.
                self._free.append(number)

    def reclaim(self) -> None:
        """Count each slot as free if the user has no view of it. Nobody may be writing into a slot."""
        self._handed_out = {key: held for key, held in self._handed_out.items() if held[0]() is not None}
        held = {number for _, number in self._handed_out.values()}
        self._free = [slot.number for slot in self.slots if slot.number not in held]

    def in_use(self) -> int:
        """Number of slots that are not free."""
        self._collect_returned()
        return len(self.slots) - len(self._free)

    def give_back(self, slot: Slot) -> None:
        """Return a slot that was never handed out."""
        self._free.append(slot.number)
