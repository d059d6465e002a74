"""Reads rows of Parquet files by index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from libai_data.data.sources.arrow_columns import BatchedShard, BatchRows, chosen_columns, import_pyarrow
from libai_data.data.sources.last_used import LastUsed
from libai_data.data.sources.mapped_file import MappedFile
from libai_data.data.sources.sharded import Paths, ShardedSource, opened
from libai_data.errors import FormatError
from libai_data.errors.argument_rules import check, check_types, whole

# Approximate bytes of a parsed footer in memory for each of its bytes in the file.
_PARSED_FOOTER = 8
_MAGIC = b"PAR1"
JOINED = "a second Parquet file follows the first one, as by `cat`; write the rows to one file"


class ParquetSource(ShardedSource):
    """The rows of Parquet files: dicts of Python values.

    A row group is decoded as a whole, and each process caches the row groups that it used last. Shuffled reading is
    fast while the row groups fit into `cache_bytes`. If they do not fit, write smaller row groups, or use ArrayRecord.
    If pages have checksums, the reader verifies them.

    Args:
        paths: files, globs or folders; see `storage.listed`.
        columns: names of the columns to read; by default all.
        cache_bytes: size of the cache of decoded row groups and footers, for all files together, in each process. One
            row group is cached even if it is larger.

    Raises:
        ConfigError: There is no such file or column, or pyarrow is not installed.
        FormatError: A file is cut short or damaged, or no Parquet file.
    """

    def __init__(self, paths: Paths, columns: Sequence[str] | None = None, cache_bytes: int = 256 << 20) -> None:
        check_types(ParquetSource, locals())
        check({"cache_bytes": whole(0)}, cache_bytes=cache_bytes)
        import_pyarrow("ParquetSource")
        files, kept = opened(paths), LastUsed(cache_bytes)
        super().__init__(files, [_Shard(file, columns, kept) for file in files], columns)


class _Shard(BatchedShard):
    def __init__(self, file: MappedFile, columns: Sequence[str] | None, kept: LastUsed) -> None:
        super().__init__(file, kept)
        opened = self._parquet()
        metadata = opened.metadata
        if is_joined(metadata, file.bytes, file.size):
            raise FormatError(f"{file.source}: {JOINED}")
        self._columns = chosen_columns(opened.schema_arrow.names, columns, file.source)
        self._ends = np.cumsum([metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)])

    def _decoded(self, number: int) -> tuple[BatchRows, int]:
        import pyarrow

        try:
            # Workers share the cores, so Arrow must not start threads.
            table = self._parquet().read_row_group(number, columns=self._columns, use_threads=False)
            table.validate(full=True)
            batches = table.combine_chunks().to_batches()
            if [len(batch) for batch in batches] != [self._rows_of(number)]:
                raise ValueError(f"it has {len(table)} rows, but the footer announces {self._rows_of(number)}")
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise FormatError(
                f"{self._file.source}, record {self._first(number)}, offset {self._offset(number)}: row group {number} "
                f"cannot be read: {error}"
            ) from error
        self._file.release()
        return BatchRows(batches[0], self._columns), batches[0].get_total_buffer_size()

    def _rows_of(self, number: int) -> int:
        return int(self._parquet().metadata.row_group(number).num_rows)

    def _offset(self, number: int) -> int:
        column = self._parquet().metadata.row_group(number).column(0)
        return int(column.dictionary_page_offset or column.data_page_offset)

    def _parquet(self) -> Any:
        """The file, opened in this process."""
        return self._kept.made(self._file.source, lambda: _open(self._file))


def is_joined(metadata: Any, content: Any, size: int) -> bool:
    """Whether `cat` joined Parquet files. The footer of the last file would then be used for the pages of the first.

    Args:
        metadata: the footer.
        content: the bytes of the file, to be sliced.
        size: of the file, in bytes.
    """
    ends = [len(_MAGIC)]
    if metadata.num_row_groups:
        group = metadata.row_group(metadata.num_row_groups - 1)
        for column in map(group.column, range(group.num_columns)):
            first = min(filter(None, (column.dictionary_page_offset, column.data_page_offset)), default=0)
            ends.append(first + column.total_compressed_size)
    # The footer counts from the beginning of its own file, so the bytes before this file are missing in its offsets.
    missing = size - 2 * len(_MAGIC) - metadata.serialized_size - max(ends)
    return 2 * _MAGIC in content[: max(missing, 0) + len(_MAGIC)]


def _open(file: MappedFile) -> tuple[Any, int]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        found = ParquetFile(pyarrow.BufferReader(pyarrow.py_buffer(file.array)), page_checksum_verification=True)
        return found, _PARSED_FOOTER * found.metadata.serialized_size
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise FormatError(f"{file.source}, offset {file.size}: no Parquet file, or it is cut short: {error}") from error
