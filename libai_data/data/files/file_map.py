"""Memory maps of files, which keep no descriptor open; `mmap.mmap` and `np.memmap` keep one open for each map."""

from __future__ import annotations

import ctypes
import errno
import io
import mmap
import os
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from libai_data.data.files.identity import FileStatus
from libai_data.errors import FormatError

if TYPE_CHECKING:  # Its imports would delay the start of each worker.
    from libai_data.atomic_files import PathLike

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value
_LONGEST_HEADER = 1 << 17


def map_descriptor(descriptor: int, offset: int, size: int, protection: int, kind: int, item: Any) -> Any:
    """Map `size` bytes (at least 1) of a file or of shared memory, from a multiple of the page size on, until nothing
    refers to the map. The descriptor may be closed afterwards.

    Args:
        protection: access rights, such as `mmap.PROT_READ`.
        kind: flags, such as `mmap.MAP_SHARED`.
        item: ctypes type of a byte.

    Returns:
        A ctypes array of `size` items; an OSError if the system refuses the map, such as for a process with too many.
    """
    address = _libc.mmap(None, size, protection, kind, descriptor, offset)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        limit = " (a process may have vm.max_map_count maps and `ulimit -v` KB)" * (number == errno.ENOMEM)
        raise OSError(number, f"cannot map {size} bytes: {os.strerror(number)}{limit}")
    mapped = (item * size).from_address(address)
    weakref.finalize(mapped, _libc.munmap, address, size).atexit = False
    return mapped


def map_privately(descriptor: int, offset: int, mapped: Any) -> None:
    """Map the range of a map (the result of `map_descriptor`) again, at the same address, but copy-on-write.
    `descriptor` and `offset` are those of the map. An OSError if the system refuses."""
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | 0x10  # MAP_FIXED
    if _libc.mmap(ctypes.addressof(mapped), ctypes.sizeof(mapped), access, kind, descriptor, offset) == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map memory again: {os.strerror(number)}")


class FileMap:
    """The bytes of a file, read-only; a FormatError if the file does not have the given status any more.

    Attributes:
        path: of the file.
        status: of the file when it was mapped.
        bytes: the content; a slice has the type `bytes`.
    """

    def __init__(self, path: PathLike, status: FileStatus | None = None) -> None:
        self.path = os.path.abspath(path)
        with open(path, "rb") as file:
            self.status = FileStatus.of(file.fileno())
            if status is not None:
                _check_same(self.path, status, self.status)
            size, read = self.status.size, mmap.PROT_READ
            self.bytes: Any = b""
            if size:
                self.bytes = map_descriptor(file.fileno(), 0, size, read, mmap.MAP_SHARED, ctypes.c_char)
                address = ctypes.addressof(self.bytes)
                self.__array_interface__ = {"data": (address, True), "shape": (size,), "typestr": "|u1", "version": 3}

    @property
    def array(self) -> np.ndarray:
        """All bytes, uint8 [size]."""
        return np.asarray(self) if self.status.size else np.empty(0, np.uint8)

    def release(self) -> None:
        """Drop the bytes from this process's resident memory; the system loads them again when they are read."""
        if self.status.size:
            _libc.madvise(ctypes.addressof(self.bytes), self.status.size, mmap.MADV_DONTNEED)

    def is_current(self) -> bool:
        """Whether the path still leads to the file that was mapped."""
        try:
            return self.status.is_same(FileStatus.of(self.path))
        except OSError:
            return False


def check_not_written(path: PathLike, before: FileStatus) -> None:
    """Raise a FormatError if the file at a path was written to since it had a status; another file is no error."""
    with suppress(OSError):
        now = FileStatus.of(path)
        if now.inode == before.inode:
            _check_same(path, before, now)


def _check_same(path: PathLike, before: FileStatus, now: FileStatus) -> None:
    if not before.is_same(now):
        raise FormatError(f"{path} has changed since it was opened: it was {before}, and is {now}; open the data again")


def npy_array(content: np.ndarray) -> np.ndarray:
    """The array in the bytes of a `.npy` file, as a view; a ValueError if it is damaged, or contains Python objects."""
    head = io.BytesIO(content[:_LONGEST_HEADER].tobytes())
    try:
        version = np.lib.format.read_magic(head)
        shape, fortran_order, dtype = np.lib.format._read_array_header(head, version)  # type: ignore[attr-defined]
    except Exception as error:  # numpy parses the header as Python, which raises many kinds of errors
        raise ValueError(f"its header cannot be read: {error}") from error
    if dtype.hasobject:
        raise ValueError("it contains Python objects")
    start, size = head.tell(), int(np.prod(shape, dtype=object)) * dtype.itemsize
    if len(content) != start + size:
        several = "; a file with several arrays cannot be read" * (len(content) > start + size)
        raise ValueError(
            f"it has {len(content)} bytes, but an array of {dtype} {shape} ends at byte {start + size}{several}"
        )
    if not size:
        return np.empty(shape, dtype)
    return content[start : start + size].view(dtype).reshape(shape, order="F" if fortran_order else "C")


# Arrays of one file share a map, although they are unpickled one by one.
_opened: weakref.WeakValueDictionary[tuple[str, FileStatus], FileMap] = weakref.WeakValueDictionary()


def reduce_mapped(array: np.ndarray) -> tuple[Callable[..., np.ndarray], tuple[Any, ...]] | None:
    """How pickle maps an array again in another process; None if it is no view of a `FileMap`, or the file changed."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if not isinstance(base, FileMap) or not array.flags.c_contiguous or not array.size or not base.is_current():
        return None
    start = array.__array_interface__["data"][0] - ctypes.addressof(base.bytes)
    return _mapped_again, (base.path, base.status, start, array.dtype, array.shape)


def _mapped_again(path: str, status: FileStatus, start: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    found = _opened.get((path, status))
    if found is None:
        found = _opened[path, status] = FileMap(path, status)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return found.array[start : start + size].view(dtype).reshape(shape)
