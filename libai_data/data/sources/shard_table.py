"""The table of a data set's shards: names, samples, bytes and versions. A stream starts without opening a shard.

`libai-data index ADDRESS` counts the samples once and writes the table beside the shards.
"""

from __future__ import annotations

import binascii
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from libai_data.atomic_files import written_whole
from libai_data.data.sources.packed_names import PackedNames
from libai_data.data.sources.remote import RemoteFile, is_remote, without_protocol, write_file
from libai_data.data.sources.storage import LocalFile, Storage
from libai_data.errors import FormatError

TABLE = ".libai_data_shards.npz"
_VERSION = 1


@dataclass(frozen=True)
class ShardTable:
    """The shards below one folder of a store, in the order of the samples."""

    format: str  # of the shards, a name of `opening.SOURCES`
    names: PackedNames  # paths of the files relative to the folder
    samples: np.ndarray  # int64 [shards]
    sizes: np.ndarray  # int64 [shards], bytes
    versions: np.ndarray  # V12 [shards], `RemoteFile.identity`, in `packed_digits`
    sums: np.ndarray  # V16 [shards], `RemoteFile.md5`, all zeros for None, in `packed_digits`
    sure: np.ndarray  # uint8 [shards], `RemoteFile.md5_is_sure`

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def identity(self) -> str:
        """A digest that changes if a shard changes."""
        digest = hashlib.blake2b(self.format.encode())
        for array in (*self.names.numbers(), self.samples):
            digest.update(array.data)
        for first in range(0, len(self), _AT_ONCE):
            digest.update(binascii.hexlify(self.versions[first : first + _AT_ONCE].tobytes()))
        return digest.hexdigest()

    def remote(self, folder: str, number: int) -> RemoteFile:
        """The shard, as the store described it when the table was written."""
        md5, version = self.sums[number].tobytes(), self.versions[number].tobytes().hex()
        md5_hex = md5.hex() if any(md5) else None
        return RemoteFile(
            f"{folder}/{self.names[number]}", int(self.sizes[number]), md5_hex, bool(self.sure[number]), version
        )

    def part(self, numbers: np.ndarray) -> ShardTable:
        """A table of the shards with these numbers, int64 [n]."""
        columns = (getattr(self, name)[numbers] for name in _COLUMNS)
        return ShardTable(self.format, PackedNames.of(self.names.many(numbers)), *columns)

    def save(self, target: str) -> None:
        """Write the table to a path or an address."""
        content = io.BytesIO()
        ends, data = self.names.numbers()
        columns = {name: getattr(self, name) for name in _COLUMNS}
        columns.update(versions=_digits(self.versions), sums=_digits(self.sums))
        np.savez(content, format=np.array([str(_VERSION), self.format]), ends=ends, data=data, **columns)
        if is_remote(target):
            write_file(target, content.getvalue(), Storage.from_environment().attempts)
        else:
            with written_whole(Path(without_protocol(target))) as part:
                part.write_bytes(content.getvalue())

    @classmethod
    def read(cls, folder: str) -> ShardTable:
        """Read the table of a folder; a ConfigError if there is none, a FormatError if it is damaged or outdated."""
        path = f"{folder}/{TABLE}"
        with LocalFile(path) as file:
            try:
                with np.load(file.path, allow_pickle=False) as found:
                    version, kind = found["format"].tolist()
                    # Column by column: the file's copy and the packed copy are both in memory for one column only.
                    columns = [_checked(found[name], name, dtype) for name, dtype in _COLUMNS.items()]
                    ends, data = _checked(found["ends"], "ends", "i8"), found["data"]
                if version == str(_VERSION):
                    _check_numbers(ends, data, columns)
            except Exception as error:  # For a damaged file, zipfile and numpy raise exceptions of many classes.
                raise FormatError(
                    f"{path} is not a table of shards, or it is cut short ({error}); run 'libai-data index {folder}' "
                    "again"
                ) from error
        if version != str(_VERSION):
            raise FormatError(
                f"{path} has version {version}; this package reads {_VERSION}; run 'libai-data index' again"
            )
        return cls(kind, PackedNames.from_numbers(ends, data), *columns)


def packed_digits(digits: np.ndarray) -> np.ndarray:
    """Convert hexadecimal digits, S2n [shards], to bytes, Vn [shards]; "" becomes zeros, also in `digits` itself."""
    digits[digits == b""] = b"0" * digits.itemsize
    return np.frombuffer(binascii.unhexlify(digits.data), f"V{digits.itemsize // 2}")


def _digits(packed: np.ndarray) -> np.ndarray:
    """The inverse of `packed_digits`."""
    digits = np.frombuffer(binascii.hexlify(packed.tobytes()), f"S{packed.itemsize * 2}").copy()
    digits[digits == b"0" * digits.itemsize] = b""
    return digits


def _checked(column: np.ndarray, name: str, dtype: str) -> np.ndarray:
    if column.dtype != dtype:
        raise ValueError(f"{name!r} has the dtype {column.dtype}")
    return packed_digits(column) if column.dtype.kind == "S" else column


def _check_numbers(ends: np.ndarray, data: np.ndarray, columns: Sequence[np.ndarray]) -> None:
    """Raise a ValueError for numbers that `ShardTable.save` does not write."""
    for name, column in zip((*_COLUMNS, "ends"), (*columns, ends)):
        if column.shape != (ends.size,):
            raise ValueError(f"{name!r} has the shape {list(column.shape)}")
    if data.dtype != "i8" or data.ndim != 1 or ends.max(initial=0) > data.nbytes:
        raise ValueError("the names are cut short")
    samples, sizes = columns[:2]
    if (ends[1:] < ends[:-1]).any() or min(each.min(initial=0) for each in (ends, samples, sizes)) < 0:
        raise ValueError("a number is below 0")
    if samples.sum(dtype=np.float64) >= 2**63:
        raise ValueError("there are too many samples")


_COLUMNS = {"samples": "i8", "sizes": "i8", "versions": "S24", "sums": "S32", "sure": "u1"}
_AT_ONCE = 1 << 16
