"""The arena: one piece of anonymous memory, shared by descriptor, in which a loader's slots lie."""

from __future__ import annotations

import mmap
import os
from typing import Dict, Tuple

import numpy as np


class Arena:
    """Memory that processes share and that is gone with the last of them, however it ends.

    One process allocates; all others that hold the descriptor map what they are told of.

    Args:
        descriptor: of an arena that another process made; by default a new one is made.
    """

    def __init__(self, descriptor: int = -1) -> None:
        self.descriptor = descriptor if descriptor >= 0 else os.memfd_create("libai_data_batches", os.MFD_CLOEXEC)
        self._mapped: Dict[Tuple[int, int], mmap.mmap] = {}

    def allocate(self, size: int) -> Tuple[int, int]:
        """Add memory at the end.

        Args:
            size: bytes.

        Returns:
            Offset and size of the new range, whole pages.

        Raises:
            OSError: There is no memory left.
        """
        offset = os.fstat(self.descriptor).st_size
        size = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self.descriptor, offset + size)
        return offset, size

    def lease(self, offset: int, size: int) -> np.ndarray:
        """The bytes of a range, uint8 [size]; each call returns another array over the same memory."""
        return np.frombuffer(self._map(offset, size), dtype=np.uint8)

    def release(self, offset: int, size: int) -> None:
        """Give a range's memory back to the system; it must be in use nowhere."""
        self._map(offset, size).madvise(mmap.MADV_REMOVE)
        del self._mapped[offset, size]

    def _map(self, offset: int, size: int) -> mmap.mmap:
        if (offset, size) not in self._mapped:
            self._mapped[offset, size] = mmap.mmap(self.descriptor, size, offset=offset)
        return self._mapped[offset, size]

    def close(self) -> None:
        """Let go of the memory; arrays over it stay valid."""
        self._mapped.clear()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
