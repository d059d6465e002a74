"""Records of ArrayRecord files, as Grain and TensorFlow Datasets use them; see `riegeli` and `array_record_index`."""

from __future__ import annotations

import os
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
_KEPT_BYTES = 32 << 20


class ArrayRecordSource(ShardedSource):
    """The records of ArrayRecord files, bytes each.

    Opening reads the list of chunks at each file's end. Files are written best with one record a group
    (`group_size:1`); of larger groups all records are decoded to get one, and those that were decoded last are kept.

    Args:
        paths: files, globs or folders; see `storage.listed`.
        verify: whether each record is compared with the checksum that was written with it. That of records longer
            than about 4 kB (or of groups so long) is left to the package array_record.

    Raises:
        ConfigError: There is no such file.
        FormatError: A file is cut short or damaged, or no ArrayRecord file; the offset is named.
    """

    def __init__(self, paths: Paths, verify: bool = True) -> None:
        files = opened(paths)
        super().__init__(files, [_Shard(file, verify) for file in files])


class _Shard:
    def __init__(self, file: MappedFile, verify: bool) -> None:
        self._file, self._verify = file, verify
        try:
            self._index = read_index(file)
        except BrokenChunk as error:
            raise FormatError(f"{file.source}: {error}") from error
        self._kept: LastUsed[list[bytes]] = LastUsed(_KEPT_BYTES)
        self._package: tuple[int, Any] = (0, None)

    def __len__(self) -> int:
        return self._index.num_records

    def read(self, rows: Sequence[int]) -> list[bytes]:
        """The records of these rows, in this order."""
        if self._index.ends is None:
            return [records[0] for records in self._chunks(rows)]
        places = np.asarray(rows, np.int64)
        numbers = np.searchsorted(self._index.ends, places, side="right")
        first = np.concatenate([[0], self._index.ends])[numbers]
        needed = np.unique(numbers).tolist()
        missing = [number for number in needed if number not in self._kept]
        found = {number: self._kept[number] for number in needed if number in self._kept}
        for number, records in zip(missing, self._chunks(missing)):
            found[number] = records
            self._kept.put(number, records, int(self._index.decoded_sizes[number]))
        return [found[number][place] for number, place in zip(numbers.tolist(), (places - first).tolist())]

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
        process, reader = self._package
        if process != os.getpid():
            try:
                from array_record.python.array_record_module import ArrayRecordReader
            except ModuleNotFoundError as error:
                raise ConfigError(
                    f"{self._file.source} holds records longer than {_HASHED_HERE} bytes, whose checksums the package "
                    "array_record compares: pip install 'libai_data[records]' on Python 3.10, or pass verify=False"
                ) from error
            reader = ArrayRecordReader(str(self._file.path), options="readahead_buffer_size:0")
            self._package = os.getpid(), reader
        return reader

    def _broken(self, number: int, error: BrokenChunk) -> FormatError:
        offset, row = int(self._index.offsets[number]), int(self._index.rows_before(np.array(number)))
        return FormatError(f"{self._file.source}, record {row}, offset {offset}: the chunk there is broken: {error}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_package": (0, None)}
