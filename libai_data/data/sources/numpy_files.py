"""Rows of numpy's `.npy` and `.npz` files, read from a memory map."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from libai_data.data.files.file_map import npy_array
from libai_data.data.sources.mapped_file import MappedFile
from libai_data.data.sources.sharded import Paths, ShardedSource, opened
from libai_data.errors import ConfigError, FormatError, SchemaError
from libai_data.mesh.arrays import check_fits

_LOCAL_HEADER = 30
# Larger arrays are not read when a file is opened: opening thousands of shards would take minutes.
_CHECKED = 1 << 20
FIELD = "data"


class NumpySource(ShardedSource):
    """The rows of arrays: a record is a dict with the field `array[index]` for each array, a view of the memory map.

    Arrays of a compressed `.npz` file are read into memory when the file is opened. Workers share this memory. The
    checksums of `.npz` files are verified when the file is opened, but not those of uncompressed arrays above 1 MiB.

    Args:
        paths: files, globs or folders, see `storage.listed`. The rows of `.npy` files are the field "data". The arrays
            of `.npz` files are the fields, with the arrays' names. Or {field: `.npy` files}, equally many per field.

    Raises:
        ConfigError: There is no such file.
        FormatError: A file is truncated, contains Python objects, or is no file of numpy.
        SchemaError: The arrays of a shard differ in length, or shards in their fields.
    """

    def __init__(self, paths: Paths | Mapping[str, Paths]) -> None:
        if isinstance(paths, Mapping):
            fields = {name: opened(each) for name, each in paths.items()}
            counts = {name: len(each) for name, each in fields.items()}
            if len(set(counts.values())) != 1:
                raise SchemaError(f"the fields must have equally many files each; there are {counts}")
            rows = list(zip(*fields.values()))
            shards = [_Shard(dict(zip(fields, map(_open_npy, row))), row[0].source) for row in rows]
            files = [file for row in rows for file in row]
        else:
            files = opened(paths)
            is_npz = [file.path.suffix.lower() == ".npz" for file in files]
            arrays = [_open_npz(file) if npz else {FIELD: _open_npy(file)} for file, npz in zip(files, is_npz)]
            shards = [_Shard(fields, file.source) for file, fields in zip(files, arrays)]
        for each in shards:
            each.check_like(shards[0])
        super().__init__(files, shards, list(paths) if isinstance(paths, Mapping) else None)

    def read_batch(self, indices: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        """Fill a batch.

        Args:
            indices: int64 [n], the records.
            out: {field: [n, ...]}, the arrays to write to.

        Raises:
            SchemaError: A field has another shape, or a dtype that `out` cannot hold, as in a `ConcatDataset`.
        """
        for number, places, rows in self.located(indices):
            for file in self.files_of(number):
                file.check_not_written()
            for name, array in self._shards[number].arrays.items():
                check_fits(name, array[0], out[name][0], f" of {self.files_of(number)[0].source}")
                out[name][places] = array[rows]


class _Shard:
    def __init__(self, arrays: dict[str, np.ndarray], name: str) -> None:
        self.arrays, self._name = arrays, name
        lengths = {field: len(array) if array.ndim else -1 for field, array in arrays.items()}
        if len(set(lengths.values())) != 1 or -1 in lengths.values():
            raise SchemaError(f"{name}: the arrays must have equally many rows; there are {lengths} (-1: no dims)")

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of all arrays, in this order."""
        return [{field: array[row] for field, array in self.arrays.items()} for row in rows]

    def check_like(self, other: _Shard) -> None:
        """Raise a SchemaError if this shard and `other` have different fields, dtypes or shapes."""
        ours, theirs = (
            {field: (str(array.dtype), array.shape[1:]) for field, array in shard.arrays.items()}
            for shard in (self, other)
        )
        if ours != theirs:
            raise SchemaError(f"the shards differ: {self._name} has {ours}, {other._name} {theirs}")


def _open_npy(file: MappedFile) -> np.ndarray:
    try:
        return npy_array(file.array)
    except (ValueError, EOFError, OSError) as error:
        raise FormatError(f"{file.source}, offset 0: no .npy file of numbers, or it is cut short: {error}") from error


def _open_npz(file: MappedFile) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    member = ""
    try:
        with zipfile.ZipFile(file.path) as archive:
            members = archive.infolist()
            if min((info.header_offset for info in members), default=0) > 0:
                raise ValueError("other data precedes the archive, such as another archive; write one to a file")
            for info in members:
                member = info.filename
                name = member[: -len(".npy")] if member.endswith(".npy") else member
                if name in arrays:
                    raise ValueError("the archive has several arrays of this name")
                if info.compress_type == zipfile.ZIP_STORED:
                    arrays[name] = _mapped_member(file, info)
                else:
                    with archive.open(info) as content:
                        arrays[name] = np.lib.format.read_array(content, allow_pickle=False)
                        if content.read(1):  # zipfile compares the checksum when it reads the end
                            raise ValueError("other bytes follow the array")
                        arrays[name].flags.writeable = False  # as those of a memory map
    except Exception as error:  # For a damaged file, zipfile, zlib and numpy raise exceptions of many classes.
        raise FormatError(
            f"{file.source}, array {member!r}: no .npz file of numbers, or it is damaged: {error}"
        ) from error
    if not arrays:
        raise ConfigError(f"{file.source} contains no array")
    return arrays


def _mapped_member(file: MappedFile, info: zipfile.ZipInfo) -> np.ndarray:
    """An array that the archive stores without compression, as a view of the memory map."""
    header = file.bytes[info.header_offset : info.header_offset + _LOCAL_HEADER]
    if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
        raise ValueError(f"offset {info.header_offset}: there is no member")
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    start = info.header_offset + _LOCAL_HEADER + names
    content = file.array[start : start + info.file_size]
    if len(content) <= _CHECKED and zlib.crc32(content.data) != info.CRC:
        raise ValueError("its bytes do not fit its checksum")
    return npy_array(content)
