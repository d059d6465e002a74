"""Shipping a dataset to worker processes: pickled once, its arrays in memory that all workers share."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
from typing import Any, Callable

import cloudpickle
import numpy as np

from libai_data.file_map import reduce_mapped

_HEADER = struct.Struct("<QQ")
_ENTRY = struct.Struct("<QQ")
_ALIGNMENT = 4096


class _Pickler(cloudpickle.CloudPickler):
    """Reopens memory maps by their file instead of copying what they map."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, np.ndarray):
            reduced = reduce_mapped(obj) or _reduce_map(obj)
            if reduced is not None:
                return reduced
        return super().reducer_override(obj)


def _reduce_map(array: np.ndarray) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """How to reopen an array that is a read-only view of a memory map; None if it is not one."""
    base: Any = array
    while isinstance(base, np.ndarray) and not isinstance(base.base, mmap.mmap):
        base = base.base
    if not isinstance(base, np.memmap) or base.filename is None or base.mode != "r":
        return None  # What is written to a map of another mode need not be in its file.
    if not array.flags.c_contiguous or not array.size:
        return None
    start = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    bare = not isinstance(array, np.memmap)
    return _open_map, (str(base.filename), base.offset + start, array.dtype.str, array.shape, bare)


def _open_map(filename: str, offset: int, dtype: str, shape: tuple[int, ...], bare: bool) -> np.ndarray:
    mapped = np.memmap(filename, dtype=dtype, mode="r", offset=offset, shape=shape)
    # Who has made a plain array of a memory map did so because each view of a memmap costs ten times as much.
    return np.asarray(mapped) if bare else mapped


def ship(cargo: Any) -> int:
    """Pickle an object into shared memory.

    Args:
        cargo: the object; lambdas, and classes of the main script, travel by value.

    Returns:
        Descriptor of the memory, for `unship` in another process.

    Raises:
        Exception: It cannot be pickled; the type of the exception is up to what refuses.
    """
    buffers: list[pickle.PickleBuffer] = []
    packed = io.BytesIO()
    _Pickler(packed, protocol=5, buffer_callback=buffers.append).dump(cargo)
    views = [buffer.raw() for buffer in buffers]
    descriptor = os.memfd_create("libai_data_dataset", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        end = _aligned(_HEADER.size + _ENTRY.size * len(views) + packed.tell())
        table = []
        for view in views:
            table.append((end, view.nbytes))
            end = _aligned(end + view.nbytes)
        file.write(_HEADER.pack(len(views), packed.tell()))
        for entry in table:
            file.write(_ENTRY.pack(*entry))
        file.write(packed.getbuffer())
        for (offset, _), view in zip(table, views):
            file.seek(offset)
            file.write(view)
        file.truncate(max(end, 1))
    return descriptor


def unship(descriptor: int) -> Any:
    """Make the object anew over the shared memory; what a process writes to its arrays, it alone sees."""
    memory = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
    count, length = _HEADER.unpack_from(memory)
    start = _HEADER.size + _ENTRY.size * count
    buffers = []
    for number in range(count):
        offset, size = _ENTRY.unpack_from(memory, _HEADER.size + _ENTRY.size * number)
        buffers.append(memory[offset : offset + size])
    return pickle.loads(memory[start : start + length], buffers=buffers)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
