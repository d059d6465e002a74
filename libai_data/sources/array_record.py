"""Records of ArrayRecord files, as Grain and TensorFlow Datasets use them; see `riegeli` and `array_record_index`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from libai_data.errors import ConfigError, FormatError
from libai_data.sources.array_record_index import read_index
from libai_data.sources.expanding import BrokenChunk
from libai_data.sources.highway_hash import hashes
from libai_data.sources.last_used import LastUsed
from libai_data.sources.mapped_file import MappedFile
from libai_data.sources.riegeli import Chunks, read_chunks, records_of
from libai_data.sources.sharded import Paths, ShardedSource, opened

_HASHED_HERE = 4096
_BYTES_OF_RECORD = 48  # What a Python object and its place in a list take.
_DECODED_AT_ONCE = 4 << 20
# The package keeps a descriptor for each file: these are for all sources together.
_readers = LastUsed(16)


class ArrayRecordSource(ShardedSource):
    """The records of ArrayRecord files, bytes each.

    Opening reads the list of chunks at each file's end. Files are written best with one record a group
    (`group_size:1`); of larger groups all records are decoded to get one, and those that were decoded last are kept.

    Args:
        paths: files, globs or folders; see `storage.listed`.
        verify: whether each record is compared with the checksum that was written with it. That of records longer
            than about 4 kB (or of groups so long) is left to the package array_record.
        cache_bytes: for the decoded groups of all files together, in each process. One group is kept even if it is
            larger.

    Raises:
        ConfigError: There is no such file.
        FormatError: A file is cut short or damaged, or no ArrayRecord file; the offset is named.
    """

    def __init__(self, paths: Paths, verify: bool = True, cache_bytes: int = 64 << 20) -> None:
        files, kept = opened(paths), LastUsed(cache_bytes)
        super().__init__(files, [_Shard(file, verify, kept) for file in files])


class _Shard:
    def __init__(self, file: MappedFile, verify: bool, kept: LastUsed) -> None:
        self._file, self._verify, self._kept = file, verify, kept
        try:
            self._index = read_index(file)
        except BrokenChunk as error:
            raise FormatError(f"{file.source}: {error}") from error

    def __len__(self) -> int:
        return self._index.num_records

    def read(self, rows: Sequence[int]) -> list[bytes]:
        """The records of these rows, in this order."""
        if self._index.ends is None:
            return [records[0] for records in self._chunks(rows)]
        places = np.asarray(rows, np.int64)
        numbers = np.searchsorted(self._index.ends, places, side="right")
        first = np.concatenate([[0], self._index.ends])[numbers]
        needed = np.unique(numbers)
        found: list[Any] = [None] * len(places)
        part = np.cumsum(self._index.decoded_sizes[needed]) // _DECODED_AT_ONCE
        for chosen in np.split(needed, np.flatnonzero(np.diff(part)) + 1):
            groups = self._groups(chosen.tolist())
            for place in np.flatnonzero(np.isin(numbers, chosen)).tolist():
                found[place] = groups[int(numbers[place])][int(places[place] - first[place])]
        return found

    def _groups(self, numbers: Sequence[int]) -> dict[int, list[bytes]]:
        """The records of chunks, of which those used last are kept."""
        found = {number: self._kept.get((self._file.source, number)) for number in numbers}
        missing = [number for number in numbers if found[number] is None]
        for number, records in zip(missing, self._chunks(missing)):
            size = int(self._index.decoded_sizes[number]) + _BYTES_OF_RECORD * len(records)
            found[number] = self._kept.put((self._file.source, number), records, size)
        return found

    def _chunks(self, numbers: Sequence[int]) -> list[list[bytes]]:
        """The records of chunks, verified."""
        asked = np.asarray(numbers, np.int64)
        try:
            chunks = read_chunks(self._file, self._index.offsets[asked])
            self._check_headers(chunks, asked)
            long = self._check_hashes(chunks)
        except BrokenChunk as error:
            raise self._broken(int(asked[error.place]), error) from error
        found: list[list[bytes]] = []
        sizes = zip(chunks.data, chunks.num_records.tolist(), chunks.decoded_sizes.tolist())
        for place, (data, num_records, decoded_size) in enumerate(sizes):
            try:
                packaged = place in long
                found.append(
                    self._by_package(int(asked[place])) if packaged else records_of(data, num_records, decoded_size)
                )
            except BrokenChunk as error:
                raise self._broken(int(asked[place]), error) from error
        return found

    def _check_headers(self, chunks: Chunks, asked: np.ndarray) -> None:
        listed = np.stack([self._index.records_in(asked), self._index.decoded_sizes[asked]])
        told = np.stack([chunks.num_records, chunks.decoded_sizes])
        wrong = np.flatnonzero((listed != told).any(axis=0))
        if len(wrong):
            place = int(wrong[0])
            raise BrokenChunk(
                f"its header tells of {told[0, place]} records with {told[1, place]} bytes, the file's footer of "
                f"{listed[0, place]} with {listed[1, place]}",
                place,
            )

    def _check_hashes(self, chunks: Chunks) -> set[int]:
        """Compare checksums; returns the places of chunks that are too long for it."""
        if not self._verify:
            return set()
        short = [place for place, data in enumerate(chunks.data) if len(data) <= _HASHED_HERE]
        wrong = np.flatnonzero(hashes([chunks.data[place] for place in short]) != chunks.data_hashes[short])
        if len(wrong):
            raise BrokenChunk("its checksum does not fit its bytes", short[int(wrong[0])])
        return set() if len(short) == len(chunks.data) else set(range(len(chunks.data))) - set(short)

    def _by_package(self, number: int) -> list[bytes]:
        first, count = (int(of(np.array(number))) for of in (self._index.rows_before, self._index.records_in))
        reader = self._reader()
        try:
            return list(reader.read(first, first + count))
        except (ValueError, RuntimeError, IndexError) as error:
            raise BrokenChunk(f"the package array_record says: {error}") from error

    def _reader(self) -> Any:
        key = tuple(self._file.identity)
        reader = _readers.get(key)
        if reader is None:
            try:
                from array_record.python.array_record_module import ArrayRecordReader
            except ModuleNotFoundError as error:
                raise ConfigError(
                    f"{self._file.source} holds records longer than {_HASHED_HERE} bytes, whose checksums the package "
                    "array_record compares: pip install 'libai_data[records]' on Python 3.10, or pass verify=False"
                ) from error
            reader = ArrayRecordReader(str(self._file.path), options="readahead_buffer_size:0")
            self._file.check_current()
            _readers.put(key, reader, 1)
        return reader

    def _broken(self, number: int, error: BrokenChunk) -> FormatError:
        offset, row = int(self._index.offsets[number]), int(self._index.rows_before(np.array(number)))
        return FormatError(f"{self._file.source}, record {row}, offset {offset}: the chunk there is broken: {error}")
