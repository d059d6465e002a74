"""Shipping a dataset to worker processes: pickled once, its arrays in memory that all workers share."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Callable, NamedTuple

import numpy as np

from libai_data.data.cached_property import cached_property
from libai_data.data.files.file_map import reduce_mapped
from libai_data.errors import StorageError
from libai_data.mesh.peers.pickling import PicklerByValue

_HEADER = struct.Struct("<QQ")
_ENTRY = struct.Struct("<QQ")
_ALIGNMENT = 64


@dataclass(frozen=True)
class Shipment:
    """A pickled object in shared memory."""

    memory: IO[bytes]  # file of the shared memory; while it is open, the memory exists
    pickled_bytes: int  # size without arrays; each process makes Python objects of these bytes
    # Memory maps that contain the object's arrays. Other processes open the mapped files by
    # this process's descriptors, so the maps must live as long as workers start.
    maps: list[mmap.mmap]

    @property
    def descriptor(self) -> int:
        """Descriptor of the memory, for `unship` in another process."""
        return self.memory.fileno()

    def close(self) -> None:
        """Release the memory."""
        self.memory.close()


class _Pickler(PicklerByValue):
    """Pickles an array over a memory map as a reference to the open file, instead of copying its content."""

    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self.maps: list[mmap.mmap] = []

    @cached_property
    def _regions(self) -> list[_Region]:
        return _mapped_files()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, np.ndarray):
            reduced = reduce_mapped(obj) or self._reduce_map(obj) or _reduce_bytes(obj)
            if reduced is not None:
                return reduced
        return super().reducer_override(obj)

    def _reduce_map(self, array: np.ndarray) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
        """How to map an array's file again; None if the array is not in a map of a file that others can open."""
        root: Any = array
        while isinstance(root, np.ndarray):
            root = root.base
        root = root.obj if isinstance(root, memoryview) else root
        if not isinstance(root, mmap.mmap) or not _is_made_of_bytes(array):
            return None
        low, high = np.byte_bounds(array)
        region = next((region for region in self._regions if region.start <= low and high <= region.stop), None)
        file = None if region is None else _open_file(region)
        if region is None or file is None:
            return None
        self.maps.append(root)
        place = region.offset + low - region.start, high - low, array.__array_interface__["data"][0] - low
        return _open_map, (file, place, _Form.of(array))


class _Form(NamedTuple):
    """What is needed to make an array over a buffer of bytes."""

    kind: type[np.ndarray]
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    writeable: bool
    attributes: dict[str, Any]

    @classmethod
    def of(cls, array: np.ndarray) -> _Form:
        attributes = {name: value for name, value in getattr(array, "__dict__", {}).items() if name != "_mmap"}
        return cls(type(array), array.dtype, array.shape, array.strides, array.flags.writeable, attributes)

    def over(self, buffer: Any, first: int) -> np.ndarray:
        """The array over a buffer in which the first item begins at the byte `first`."""
        array: np.ndarray = np.ndarray.__new__(self.kind, self.shape, self.dtype, buffer, first, self.strides)
        if self.attributes:
            array.__dict__.update(self.attributes)
        if isinstance(array, np.memmap) and isinstance(buffer, mmap.mmap):
            array._mmap = buffer  # type: ignore[attr-defined]
        array.flags.writeable &= self.writeable
        return array


_PICKLED_BY = "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"
_MOST_BYTES_PER_BYTE = 2


def _is_made_of_bytes(array: np.ndarray) -> bool:
    """Whether bytes and a `_Form` describe the array: its class, such as `np.recarray`, has no pickling of its own."""
    is_numpys = all(getattr(type(array), name, None) is getattr(np.ndarray, name, None) for name in _PICKLED_BY)
    return is_numpys and bool(array.size) and not array.dtype.hasobject


def _reduce_bytes(array: np.ndarray) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """How to make an array over bytes that all processes share; None if numpy's pickling shares them, or is needed.

    For an array with gaps, or of a subclass, numpy's pickling makes a copy in each process.
    """
    if type(array) is np.ma.MaskedArray and not array.dtype.hasobject:
        mask = None if array.mask is np.ma.nomask else array.mask
        return _masked, (array.data, mask, vars(array)["_fill_value"], array.hardmask)
    if not _is_made_of_bytes(array) or (type(array) is np.ndarray and array.flags.forc):
        return None
    writeable = array.flags.writeable
    low, high = np.byte_bounds(array)
    if high - low > _MOST_BYTES_PER_BYTE * array.nbytes:
        array = array.copy()
        low, high = np.byte_bounds(array)
    place = {"data": (low, not writeable), "shape": (high - low,), "typestr": "|u1", "version": 3}
    content = np.asarray(SimpleNamespace(__array_interface__=place, array=array))
    first = array.__array_interface__["data"][0] - low
    return _over_bytes, (_Form.of(array)._replace(writeable=writeable), content, first)


def _over_bytes(form: _Form, content: np.ndarray, first: int) -> np.ndarray:
    return form.over(content, first)


def _masked(data: np.ndarray, mask: Any, fill_value: Any, is_hard: bool) -> np.ndarray:
    mask = np.ma.nomask if mask is None else mask
    array: np.ndarray = np.ma.MaskedArray(data, mask, fill_value=fill_value, hard_mask=is_hard, keep_mask=False)
    return array


class _Region(NamedTuple):
    """Addresses at which this process maps a file from an offset on, as listed in /proc/self/maps."""

    start: int
    stop: int
    offset: int
    inode: int
    path: str


class _File(NamedTuple):
    """A file that a process has open; its path may have changed, or be deleted."""

    process: int
    descriptor: int
    identity: tuple[int, int]
    path: str


def _mapped_files() -> list[_Region]:
    """Where this process maps files; writable private maps are left out, because they may differ from the file."""
    regions: list[_Region] = []
    for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
        addresses, access, offset, _, inode, *path = line.split(maxsplit=5)
        if not path or ("w" in access and "p" in access):
            continue
        start, stop = (int(address, 16) for address in addresses.split("-"))
        found = _Region(start, stop, int(offset, 16), int(inode), path[0].replace("\\012", "\n"))
        last = regions[-1] if regions else None
        if (
            last is not None
            and last[1] == start
            and last[2] + last[1] - last[0] == found.offset
            and last[3:] == found[3:]
        ):
            regions[-1] = last._replace(stop=stop)
        else:
            regions.append(found)
    return regions


def _open_file(region: _Region) -> _File | None:
    """The file that a memory map keeps open; None if it is not found, or ambiguous."""
    found: dict[tuple[int, int], _File] = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # The descriptor of the listing itself is closed.
            if os.readlink(f"/proc/self/fd/{name}") == region.path:
                status = os.stat(f"/proc/self/fd/{name}")
                identity = status.st_dev, status.st_ino
                found[identity] = _File(os.getpid(), int(name), identity, region.path)
    # On some file systems (overlays), a map has another inode number than its file.
    exact = [file for file in found.values() if file.identity[1] == region.inode] or list(found.values())
    return exact[0] if len(exact) == 1 else None


def _open_map(file: _File, place: tuple[int, int, int], form: _Form) -> np.ndarray:
    """Map a file that another process has open, copy-on-write: only this process sees what it writes to the array."""
    begin, length, first = place
    aligned = begin % mmap.ALLOCATIONGRANULARITY
    try:
        with open(f"/proc/{file.process}/fd/{file.descriptor}", "rb") as opened:
            status = os.fstat(opened.fileno())
            if (status.st_dev, status.st_ino) != file.identity:
                raise OSError("the trainer has closed it")
            access = mmap.ACCESS_COPY if form.writeable else mmap.ACCESS_READ
            mapped = mmap.mmap(opened.fileno(), aligned + length, access=access, offset=begin - aligned)
    except (OSError, ValueError) as error:
        raise StorageError(
            f"a worker cannot map {file.path}, bytes {begin} to {begin + length}, as the trainer does: {error}. Keep "
            "the file and the array over it as they are while workers start, or use start_method='fork'"
        ) from error
    return form.over(mapped, aligned + first)


def ship(payload: Any, weigh: Callable[[int], None] = lambda _: None) -> Shipment:
    """Pickle an object into shared memory.

    Args:
        payload: the object; lambdas, and classes of the main script, are pickled by value.
        weigh: called with `pickled_bytes` before arrays are copied; may raise an exception.
    """
    buffers: list[pickle.PickleBuffer] = []
    packed = io.BytesIO()
    pickler = _Pickler(packed, buffers)
    pickler.dump(payload)
    weigh(packed.tell())
    views = [buffer.raw() for buffer in buffers]
    # In one line, so that no interrupt leaves a descriptor behind.
    file = open(os.memfd_create("libai_data_dataset", os.MFD_CLOEXEC), "wb")  # noqa: SIM115
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
    return Shipment(file, packed.tell(), pickler.maps)


def unship(descriptor: int) -> Any:
    """Unpickle the object, with arrays over the shared memory; only this process sees what it writes to them."""
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
