"""Records of ArrayRecord files, as Grain and TensorFlow Datasets use them, read by the package array_record."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from typing import Any

from libai_data.data.sources.last_used import LastUsed
from libai_data.data.sources.mapped_file import MappedFile
from libai_data.data.sources.sharded import Paths, ShardedSource, opened
from libai_data.errors import FormatError, installed, naming_open_files

_MOST_OPEN = 256
# An open reader uses a file descriptor. All sources of a process together use at most a quarter of its limit.
_descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
_readers = LastUsed(_MOST_OPEN if _descriptors == resource.RLIM_INFINITY else min(_descriptors // 4, _MOST_OPEN))


class ArrayRecordSource(ShardedSource):
    """The records of ArrayRecord files, as bytes; each read verifies the checksums.

    Opening a file reads the list of chunks at its end. Write files with one record per group (`group_size:1`): a larger
    group is decoded again for each of its records.

    Args:
        paths: files, globs or folders; see `storage.listed`.

    Raises:
        ConfigError: There is no such file, or the package array_record is not installed.
        FormatError: A file is cut short or damaged, or no ArrayRecord file.
    """

    def __init__(self, paths: Paths) -> None:
        array_record_module("ArrayRecordSource")
        files = opened(paths)
        super().__init__(files, [_Shard(file) for file in files])


def array_record_module(whom: str) -> Any:
    """The package array_record; `whom` names the user of the package in the error if it is not installed."""
    return installed("array_record.python.array_record_module", whom, "'libai_data[records]' on Python 3.10")


class _Shard:
    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self._count = int(self._reader().num_records())

    def __len__(self) -> int:
        return self._count

    def read(self, rows: Sequence[int]) -> list[bytes]:
        """The records of these rows, in this order."""
        reader = self._reader()
        return [self._record(reader, row) for row in rows]

    def _record(self, reader: Any, row: int) -> bytes:
        try:
            (record,) = reader.read(row, row + 1)
        except (RuntimeError, ValueError, IndexError) as error:
            raise FormatError(f"{self._file.source}, record {row} cannot be read: {error}") from error
        return bytes(record)

    def _reader(self) -> Any:
        """The file's reader, opened in this process."""
        return _readers.made(tuple(self._file.identity), self._open)

    def _open(self) -> tuple[Any, int]:
        module = array_record_module(self._file.source)
        reader = module.ArrayRecordReader(str(self._file.path), options="readahead_buffer_size:0")
        if not reader.ok():
            with naming_open_files(), open(self._file.path, "rb"):  # The reader does not show the error of the system.
                pass
            raise FormatError(f"{self._file.source} is not an ArrayRecord file, or it is cut short or damaged")
        self._file.check_current()
        return reader, 1
