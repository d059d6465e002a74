"""The arena: one piece of anonymous memory, shared by descriptor, in which a loader's slots lie."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from libai_data.data.files.file_map import map_descriptor
from libai_data.data.fork_lock import ForkLock

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


_memory = partial(os.memfd_create, "libai_data_batches", os.MFD_CLOEXEC)


class Arena:
    """Memory that processes share and that is gone with the last of them, however it ends.

    One process allocates; all others that hold the descriptor map what they are told of.

    Args:
        descriptor: of an arena that another process made; by default a new one is made.
    """

    def __init__(self, descriptor: int = -1) -> None:
        self._mapped: dict[tuple[int, int], Any] = {}
        self._lock = ForkLock()
        _open_standard_descriptors()
        # The memory of a loader that nobody closed goes with it; in one line, so that no interrupt comes between.
        self._close_descriptor = weakref.finalize(self, os.close, descriptor if descriptor >= 0 else _memory())
        self.descriptor: int = self._close_descriptor.peek()[2][0]  # type: ignore[index]

    def allocate(self, size: int) -> tuple[int, int]:
        """Add memory at the end; returns offset and size of the new range, whole pages."""
        offset = os.fstat(self.descriptor).st_size
        size = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self.descriptor, offset + size)
        return offset, size

    def lease(self, offset: int, size: int) -> np.ndarray:
        """The bytes of a range, uint8 [size]; each call returns another array over the same memory."""
        memory = self._mapped.get((offset, size))
        return np.frombuffer(self._map(offset, size) if memory is None else memory, np.uint8)

    def private_lease(self, offset: int, size: int) -> np.ndarray:
        """The bytes of a range as they are now, uint8 [size]; what is written to this array, no other process sees.

        The range must not be written to while the array is in use.
        """
        with self._lock:
            if self.descriptor < 0:
                raise OSError(errno.EBADF, "the loader's memory is closed")
            return np.frombuffer(_map(self.descriptor, offset, size, mmap.MAP_PRIVATE), dtype=np.uint8)

    def release(self, offset: int, size: int) -> None:
        """Give a range's memory back to the system; it must be in use nowhere."""
        if _libc.madvise(ctypes.addressof(self._map(offset, size)), size, mmap.MADV_REMOVE):
            raise _last_error("cannot give memory back")
        del self._mapped[offset, size]

    def _map(self, offset: int, size: int) -> Any:
        # A closed loader's threads may still be at work: they must not map what another one has opened since.
        with self._lock:
            if self.descriptor < 0:
                raise OSError(errno.EBADF, "the loader's memory is closed")
            if (offset, size) not in self._mapped:
                self._mapped[offset, size] = _map(self.descriptor, offset, size)
            return self._mapped[offset, size]

    def close(self) -> None:
        """Let go of the memory; arrays over it stay valid."""
        with self._lock:
            self._mapped.clear()
            self.descriptor = -1
            self._close_descriptor()


class PrivateArena(Arena):
    """Memory of this process alone, for readers that have no other: in huge pages, where the system has them.

    Shared memory rarely comes in huge pages, and filling a batch of images in small ones takes a quarter longer.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        self._mapped = {}
        self._lock = ForkLock()
        self._end = 0

    def allocate(self, size: int) -> tuple[int, int]:
        offset, size = self._end, -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._end += size
        return offset, size

    def release(self, offset: int, size: int) -> None:
        self._mapped.pop((offset, size), None)

    def _map(self, offset: int, size: int) -> Any:
        with self._lock:
            if (offset, size) not in self._mapped:
                memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                with suppress(OSError):  # A system without huge pages.
                    memory.madvise(mmap.MADV_HUGEPAGE)
                self._mapped[offset, size] = memory
            return self._mapped[offset, size]

    def close(self) -> None:
        with self._lock:
            self._mapped.clear()


def _map(descriptor: int, offset: int, size: int, kind: int = mmap.MAP_SHARED) -> Any:
    """Shared memory as a ctypes array, which holds no descriptor, so that a user may keep any number of batches."""
    return map_descriptor(descriptor, offset, size, mmap.PROT_READ | mmap.PROT_WRITE, kind, ctypes.c_ubyte)


def _open_standard_descriptors() -> None:
    """Open those of 0, 1 and 2 that are closed, so that nothing that workers inherit has these numbers."""
    for standard in range(3):
        try:
            os.fstat(standard)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # The lowest number that is free.


def _last_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
