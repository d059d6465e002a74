"""The base of sources of several files: their records, one file after the other."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, Union

import numpy as np

from libai_data.atomic_files import PathLike
from libai_data.data.files.identity import key_of
from libai_data.data.sources.file_formats import problem_of_pointer
from libai_data.data.sources.manifest import check_complete, check_finished
from libai_data.data.sources.mapped_file import MappedFile
from libai_data.data.sources.remote import without_protocol
from libai_data.data.sources.storage import listed, patterns_of
from libai_data.errors import FormatError, first_repeated

logger = logging.getLogger(__name__)

Paths = Union[PathLike, Sequence[PathLike]]
Indices = Union[Sequence[int], np.ndarray]

_READ_AT_ONCE = 256
_LARGEST_POINTER = 1024  # bytes


def opened(paths: Paths | MappedFile) -> list[MappedFile]:
    """The files that `paths` names, see `storage.listed`; or only the given file, if it is open already. Also a
    ConfigError if a folder lacks shards of `libai-data convert`; a FormatError if a file is a pointer of Git LFS."""
    if isinstance(paths, MappedFile):
        return [paths]
    folders = [Path(folder) for folder in map(without_protocol, patterns_of(paths)) if os.path.isdir(folder)]
    for folder in folders:
        check_complete(folder)
    files = [MappedFile(path) for path in listed(paths)]
    for file in files:
        if file.size <= _LARGEST_POINTER and (problem := problem_of_pointer(file.path.read_bytes())):
            raise FormatError(f"{file.source}: {problem}")
    for folder in folders:
        check_finished(folder)  # A conversion that began meanwhile may have replaced some of the files.
    twice = first_repeated(tuple(file.identity) for file in files)
    if twice is not None:
        names = [file.source for file in files if tuple(file.identity) == twice]
        words = "%s are one file, so its records are read %d times. If this is not intended, remove such links."
        logger.warning(words, names, len(names))
    return files


class Shard(Protocol):
    """The records of one file; picklable, and a process that unpickles it opens the file again."""

    def __len__(self) -> int: ...

    def read(self, rows: Sequence[int]) -> list[Any]:
        """The records of these rows, in this order."""
        ...


class Records:
    """Records of shards, one shard after the other; subclasses set `_ends`, and read the rows of a shard."""

    _ends: np.ndarray
    """Records up to the end of each shard, int64 [shards]."""

    @property
    def _what(self) -> str:
        """What the indices count, for messages."""
        return f"records of {type(self).__name__}"

    def rows_of(self, number: int, rows: np.ndarray) -> list[Any]:
        """The records of these rows of a shard, int64 [n], in this order; the rows are not checked."""
        raise NotImplementedError

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Any:
        """The record at an index; negative indices count from the end. An IndexError if there is no such record; a
        FormatError with shard, record and offset if it cannot be read."""
        return self.read_many([operator.index(index)])[0]

    def __iter__(self) -> Iterator[Any]:
        """All records in their order."""
        for first in range(0, len(self), _READ_AT_ONCE):
            yield from self.read_many(range(first, min(first + _READ_AT_ONCE, len(self))))

    def read_many(self, indices: Indices) -> list[Any]:
        """Records, in the order of their indices, [n]; faster than one by one. Errors are those of `source[index]`;
        also a TypeError if the indices are no ints."""
        if len(self._ends) == 1:
            return self.rows_of(0, self._checked(indices))
        found: list[Any] = [None] * len(indices)
        for number, places, rows in self.located(indices):
            for place, record in zip(places.tolist(), self.rows_of(number, rows)):
                found[place] = record
        return found

    # The method by which loaders fetch samples.
    __getitems__ = read_many

    def located(self, indices: Indices) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Group records by shard: the shard's number, the places of its records in `indices`, and their rows in it. An
        IndexError if there is no such record."""
        return runs_of(self._ends, self._checked(indices))

    def _checked(self, indices: Indices) -> np.ndarray:
        return checked_indices(indices, len(self), self._what)


class ShardedSource(Records):
    """Records of files, in the order of the files; each shard has the same number of consecutive files. `options` are
    other values on which the records depend.

    Attributes:
        paths: paths or addresses of the files.
        identity: identity of the records; see `libai_data.data.files.identity`.
        shard_lengths: int64 [shards], the number of records of each shard, in the order of the indices.
    """

    def __init__(self, files: Sequence[MappedFile], shards: Sequence[Shard], options: Any = None) -> None:
        self._shards: list[Any] = list(shards)
        self.shard_lengths = np.array([len(shard) for shard in self._shards], dtype=np.int64)
        self._ends = np.cumsum(self.shard_lengths)
        self.paths: list[str] = [file.source for file in files]
        self._files, self._options = list(files), options
        self.identity = key_of(type(self).__name__, options, [file.identity for file in files])

    def rows_of(self, number: int, rows: np.ndarray) -> list[Any]:
        for file in self.files_of(number):
            file.check_not_written()
        return self._shards[number].read(rows.tolist())

    def files_of(self, number: int) -> list[MappedFile]:
        """The files of a shard."""
        count = len(self._files) // len(self._shards)
        return self._files[number * count : (number + 1) * count]

    def identity_of(self, first: int, stop: int) -> str:
        """The identity of records `first` to `stop` - 1, from the current state of their files."""
        begins = np.concatenate([[0], self._ends[:-1]])
        parts = []
        for number in np.flatnonzero((begins < stop) & (self._ends > first)).tolist():
            rows = [max(first - int(begins[number]), 0), min(stop, int(self._ends[number])) - int(begins[number])]
            parts.append([[file.current_identity() for file in self.files_of(number)], rows])
        return key_of(type(self).__name__, self._options, parts)

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint stores to identify the data: the number of files, and a hash of their names, without
        folders, their sizes and their numbers of records, in their order."""
        names = [[file.source.rpartition("/")[2], file.size] for file in self._files]
        return {"files": len(names), "names": key_of(names, self.shard_lengths.tolist())}

    def place_of(self, index: int) -> str:
        """The file and row of a record, in words; for sources with one file per shard."""
        number, _, rows = next(self.located([index]))
        return f"{self.paths[number]}, record {int(rows[0])}"


def runs_of(ends: np.ndarray, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Find rows, int64 [n], in consecutive parts, of which `ends` says where they end, int64 [parts]; yields a part's
    number, the places in `rows`, and the rows within the part."""
    if not len(rows):
        return
    numbers = ends.searchsorted(rows, side="right")
    places = numbers.argsort(kind="stable")
    numbers = numbers[places]
    own = rows[places] - np.where(numbers, ends[numbers - 1], 0)
    # Not `np.unique`, which would sort once more.
    begins = (numbers[1:] != numbers[:-1]).nonzero()[0] + 1
    edges = [0, *begins.tolist(), len(rows)]
    for first, stop in zip(edges, edges[1:]):
        yield int(numbers[first]), places[first:stop], own[first:stop]


def checked_indices(indices: Indices, count: int, what: str) -> np.ndarray:
    """Convert indices, of which negative ones count from the end, to int64 [n] from 0 on. An IndexError if one is
    outside; a TypeError if they are no list of ints, such as a mask."""
    asked = np.asarray(indices)
    if asked.ndim != 1 or (asked.size and asked.dtype.kind not in "iu"):
        raise TypeError(
            f"the indices of {what} are {asked.dtype} {list(asked.shape)}; give a list of ints (np.flatnonzero of a "
            "mask)"
        )
    outside = np.flatnonzero((asked < -count) | (asked >= count))
    if len(outside):
        raise IndexError(f"{int(asked[outside[0]])} is outside the {count} {what}")
    asked = asked.astype(np.int64)
    return np.where(asked < 0, asked + count, asked)
