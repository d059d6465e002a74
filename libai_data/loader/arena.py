"""The arena: anonymous memory for the slots of a loader, which processes share by its descriptor."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from functools import partial
from typing import Any

import numpy as np

from libai_data.data.files.file_map import map_descriptor, map_privately
from libai_data.data.fork_lock import ForkLock

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


_shared: weakref.WeakSet[Arena] = weakref.WeakSet()
_memory = partial(os.memfd_create, "libai_data_batches", os.MFD_CLOEXEC)


class Arena:
    """Memory that processes share. When the last process ends, in whatever way, the system frees the memory.

    One process allocates ranges. Other processes that have its `descriptor` map the ranges that they are sent.
    """

    def __init__(self, descriptor: int = -1) -> None:
        self._mapped: dict[tuple[int, int], Any] = {}
        self._lock = ForkLock()
        _shared.add(self)
        open_standard_descriptors()
        # Frees the memory if nobody closes the loader. In one line, so that no interrupt can leak the descriptor.
        self._close_descriptor = weakref.finalize(self, os.close, descriptor if descriptor >= 0 else _memory())
        self.descriptor: int = self._close_descriptor.peek()[2][0]  # type: ignore[index]

    def allocate(self, size: int) -> tuple[int, int]:
        """Add memory at the end; returns offset and size of the new range, in bytes, rounded up to whole pages."""
        offset = os.fstat(self.descriptor).st_size
        size = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            os.ftruncate(self.descriptor, offset + size)
        except OSError as error:
            raise OSError(
                error.errno,
                f"the memory that the workers share cannot grow to {offset + size} bytes: {error.strerror} (the limit "
                "of a file's size, `ulimit -f` KB, holds for it too). Raise the limit, use smaller batches, a smaller "
                "prefetch or worker_type='thread'",
            ) from error
        return offset, size

    def lease(self, offset: int, size: int) -> np.ndarray:
        """The bytes of a range, uint8 [size]; each call returns another array over the same memory."""
        memory = self._mapped.get((offset, size))
        return np.frombuffer(self._map(offset, size) if memory is None else memory, np.uint8)

    def private_lease(self, offset: int, size: int) -> np.ndarray:
        """The bytes of a range, copy-on-write, uint8 [size]: other processes do not see writes to this array.

        No process may write to the range while the array is in use.
        """
        with self._lock:
            if self.descriptor < 0:
                raise OSError(errno.EBADF, "the loader's memory is closed")
            return np.frombuffer(_map(self.descriptor, offset, size, mmap.MAP_PRIVATE), dtype=np.uint8)

    def release(self, offset: int, size: int) -> None:
        """Return the memory of a range to the system; no process may still use the range."""
        if _libc.madvise(ctypes.addressof(self._map(offset, size)), size, mmap.MADV_REMOVE):
            raise _last_error("cannot give memory back")
        del self._mapped[offset, size]

    def _map(self, offset: int, size: int) -> Any:
        # Threads of a closed loader may still run: they must not map another file that reuses the descriptor's number.
        with self._lock:
            if self.descriptor < 0:
                raise OSError(errno.EBADF, "the loader's memory is closed")
            if (offset, size) not in self._mapped:
                self._mapped[offset, size] = _map(self.descriptor, offset, size)
            return self._mapped[offset, size]

    def keep_private(self) -> None:
        """In a fork: map the ranges copy-on-write, where they are, so that the other processes do not see writes."""
        for (offset, _), memory in self._mapped.items():
            map_privately(self.descriptor, offset, memory)

    def close(self) -> None:
        """Release the memory; arrays over it stay valid."""
        with self._lock:
            self._mapped.clear()
            self.descriptor = -1
            self._close_descriptor()


class PrivateArena(Arena):
    """Memory of this process alone, for loaders without worker processes; in huge pages if the system has them.

    Shared memory is rarely in huge pages, and filling a batch of images in small pages takes a quarter longer.
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
                memory = _map(-1, 0, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                _libc.madvise(ctypes.addressof(memory), size, mmap.MADV_HUGEPAGE)  # Fails without huge pages.
                self._mapped[offset, size] = memory
            return self._mapped[offset, size]

    def close(self) -> None:
        with self._lock:
            self._mapped.clear()


def _after_fork() -> None:
    for arena in list(_shared):
        arena.keep_private()


os.register_at_fork(after_in_child=_after_fork)


def _map(descriptor: int, offset: int, size: int, kind: int = mmap.MAP_SHARED) -> Any:
    """Map memory as a ctypes array, which keeps no descriptor open, so that users may keep any number of batches."""
    return map_descriptor(descriptor, offset, size, mmap.PROT_READ | mmap.PROT_WRITE, kind, ctypes.c_ubyte)


def open_standard_descriptors() -> None:
    """Open descriptors 0, 1 and 2 if they are closed, so that no descriptor that workers inherit has these numbers."""
    for standard in range(3):
        try:
            os.fstat(standard)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # Gets the lowest free number.


def _last_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
