"""Slots: the memory of one batch each, in a ring; a slot comes back when the last view of it is gone."""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Deque, Dict, Iterable, List, Sequence, Tuple

import numpy as np

logger = logging.getLogger(__name__)

_ALIGNMENT = 64


@dataclass(frozen=True)
class ArraySpec:
    """Where an array lies within a slot: name, numpy dtype as text, shape with the batch dim, offset in bytes."""

    name: str
    dtype: str
    shape: Tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


def lay_out(arrays: Iterable[Tuple[str, np.dtype, Sequence[int]]]) -> Tuple[ArraySpec, ...]:
    """Place arrays one behind the other, each on a cache line's border.

    Args:
        arrays: name, dtype and shape of each.
    """
    specs: List[ArraySpec] = []
    end = 0
    for name, dtype, shape in arrays:
        spec = ArraySpec(name, np.dtype(dtype).str, tuple(int(size) for size in shape), end)
        specs.append(spec)
        end = -(-(end + spec.nbytes) // _ALIGNMENT) * _ALIGNMENT
    return tuple(specs)


def bytes_of(specs: Sequence[ArraySpec]) -> int:
    """Bytes that a slot needs for these arrays."""
    return max((spec.offset + spec.nbytes for spec in specs), default=0)


class Slot:
    """Memory of one batch: anonymous, shareable by its descriptor, and gone with the last process that holds it.

    Args:
        number: its place in the ring.
        size: bytes to begin with.
        descriptor: of a slot that another process made; by default a new one is made.
    """

    def __init__(self, number: int, size: int, descriptor: int = -1) -> None:
        self.number = number
        self.descriptor = (
            descriptor if descriptor >= 0 else os.memfd_create(f"libai_data_slot_{number}", os.MFD_CLOEXEC)
        )
        self._memory: mmap.mmap | None = None
        self.size = 0
        self.reserve(size)

    def reserve(self, size: int) -> None:
        """Make sure that at least `size` bytes are there and mapped; views of earlier mappings stay valid.

        Raises:
            OSError: There is no memory left.
        """
        size = max(size, mmap.PAGESIZE)
        if size <= self.size:
            return
        if os.fstat(self.descriptor).st_size < size:
            os.ftruncate(self.descriptor, size)
        self._memory = mmap.mmap(self.descriptor, size)
        self.size = size

    def lease(self) -> np.ndarray:
        """The slot's bytes, uint8 [size]; every view made of the returned array keeps it alive."""
        return np.frombuffer(self._memory, dtype=np.uint8)  # type: ignore[arg-type]

    def arrays(self, specs: Sequence[ArraySpec]) -> Dict[str, np.ndarray]:
        """Views of the slot's memory, over one lease."""
        return views(self.lease(), specs)

    def close(self) -> None:
        """Give up the descriptor; memory that is still viewed lives on."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def views(lease: np.ndarray, specs: Sequence[ArraySpec]) -> Dict[str, np.ndarray]:
    """The arrays that lie in a slot's bytes."""
    return {
        spec.name: lease[spec.offset : spec.offset + spec.nbytes].view(spec.dtype).reshape(spec.shape) for spec in specs
    }


class SlotRing:
    """The slots of one loader.

    Args:
        planned: slots that the loader needs when its user keeps one batch at a time; more are made, and reported once,
            when the user keeps more.
    """

    def __init__(self, planned: int) -> None:
        self.planned = planned
        self.slots: List[Slot] = []
        # Appended to by finalizers, which may run in any thread: append and popleft of a deque are atomic.
        self._free: Deque[int] = deque()
        self._reported = False

    def acquire(self, size: int) -> Slot:
        """Take a free slot of at least `size` bytes, or make one."""
        try:
            slot = self.slots[self._free.popleft()]
            slot.reserve(size)
            return slot
        except IndexError:
            return self._grow(size)

    def _grow(self, size: int) -> Slot:
        if len(self.slots) >= self.planned and not self._reported:
            self._reported = True
            logger.warning(
                "More than %d batches are in use at once, so the loader's memory grows by %.1f MB a batch; batches "
                "that you keep stay valid, but copy what you keep for long.",
                self.planned,
                size / 1e6,
            )
        slot = Slot(len(self.slots), size)
        self.slots.append(slot)
        return slot

    def hand_out(self, slot: Slot, specs: Sequence[ArraySpec]) -> Dict[str, np.ndarray]:
        """Views of a slot that comes back to the ring when the last of them is gone."""
        lease = slot.lease()
        weakref.finalize(lease, self._free.append, slot.number).atexit = False
        return views(lease, specs)

    def give_back(self, slot: Slot) -> None:
        """Return a slot that was never handed out."""
        self._free.append(slot.number)

    def close(self) -> None:
        """Give up all descriptors; batches that are still in use stay valid."""
        for slot in self.slots:
            slot.close()
