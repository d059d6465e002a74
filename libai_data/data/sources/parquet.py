"""Reads rows of Parquet files by index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from libai_data.data.sources.arrow_columns import BatchedShard, BatchRows, FileColumns, damage_named, import_pyarrow
from libai_data.data.sources.file_formats import warn_of_partitions
from libai_data.data.sources.last_used import LastUsed
from libai_data.data.sources.mapped_file import MappedFile
from libai_data.data.sources.sharded import Paths, ShardedSource, opened
from libai_data.errors import FormatError
from libai_data.errors.argument_rules import check_types, whole

# Approximate bytes of a parsed footer in memory for each of its bytes in the file.
_PARSED_FOOTER = 8
_MAGIC = b"PAR1"
JOINED = "a second Parquet file follows the first one, as by `cat`; write the rows to one file"

_LISTS_OF_FIXED_SIZE = (
    "; pyarrow reads no lists of a fixed size if one is null: write the column as lists without a fixed size"
)


class ParquetSource(ShardedSource):
    """The rows of Parquet files: dicts of Python values.

    A row group is decoded as a whole, and each process caches the row groups that it used last. Shuffled reading is
    fast while the row groups fit into `cache_bytes`. If they do not fit, write smaller row groups, or use ArrayRecord.
    If pages have checksums, the reader verifies them. Values that only folders have in their names, as in
    `year=2024/a.parquet`, are not read, and a warning names them.

    Args:
        paths: files, globs or folders; see `storage.listed`.
        columns: names of the columns to read; by default all.
        cache_bytes: size of the cache of decoded row groups and footers, for all files together, in each process. One
            row group is cached even if it is larger.

    Attributes:
        schema: the `pyarrow.Schema` of the first file with rows; None if no file has rows.

    Raises:
        ConfigError: There is no such file or column, or pyarrow is not installed.
        FormatError: A file is cut short or damaged, or no Parquet file.
        SchemaError: The columns that are read differ between the files.
    """

    def __init__(self, paths: Paths, columns: Sequence[str] | None = None, cache_bytes: int = 256 << 20) -> None:
        check_types(ParquetSource, locals(), {"cache_bytes": whole(0)})
        import_pyarrow("ParquetSource")
        files, kept, chosen = opened(paths), LastUsed(cache_bytes), FileColumns(columns)
        super().__init__(files, [_Shard(file, chosen, kept) for file in files], columns)
        self.schema = chosen.first
        if files and not isinstance(paths, MappedFile):
            warn_of_partitions(self.paths[0], self.schema.names if self.schema else ())


class _Shard(BatchedShard):
    def __init__(self, file: MappedFile, columns: FileColumns, kept: LastUsed) -> None:
        super().__init__(file, kept)
        opened = self._parquet()
        metadata = opened.metadata
        where = f"{file.source}, offset {file.size}"
        with damage_named(f"{where}: the columns of its footer cannot be read; encrypted files are not supported"):
            joined = is_joined(opened, file.bytes, file.size)
        if joined:
            raise FormatError(f"{file.source}: {JOINED}")
        self._ends = np.cumsum([metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)])
        self._columns = columns.chosen(file.source, opened.schema_arrow, len(self))

    def _decoded(self, number: int) -> tuple[BatchRows, int]:
        import pyarrow

        try:
            # Workers share the cores, so Arrow must not start threads.
            table = self._parquet().read_row_group(number, columns=self._columns, use_threads=False)
            table.validate(full=True)
            batches = table.combine_chunks().to_batches()
            if len(batches) > 1:  # Arrow's offsets have 32 bits.
                raise ValueError("a column has more than 2 GiB in it; write smaller row groups")
            if [len(batch) for batch in batches] != [self._rows_of(number)]:
                raise ValueError(f"it has {len(table)} rows, but the footer announces {self._rows_of(number)}")
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise FormatError(
                f"{self._file.source}, record {self._first(number)}{self._offset(number)}: row group {number} cannot "
                f"be read: {error}{_LISTS_OF_FIXED_SIZE * ('Expected all lists to be of size' in str(error))}"
            ) from error
        self._file.release()
        return BatchRows(batches[0], self._columns), batches[0].get_total_buffer_size()

    def _rows_of(self, number: int) -> int:
        return int(self._parquet().metadata.row_group(number).num_rows)

    def _offset(self, number: int) -> str:
        """Where a row group begins, in words; "" if this cannot be read."""
        import pyarrow

        try:
            column = _columns(self._parquet(), number)[0]
        except (pyarrow.ArrowException, OSError, ValueError, IndexError):
            return ""
        return f", offset {column.dictionary_page_offset or column.data_page_offset}"

    def _parquet(self) -> Any:
        """The file, opened in this process."""
        return self._kept.made(self._file.source, lambda: _open(self._file))


def is_joined(file: Any, content: Any, size: int) -> bool:
    """Whether `cat` joined Parquet files. The footer of the last file would then be used for the pages of the first.

    Args:
        file: the `pyarrow.parquet.ParquetFile`; if the columns in its footer are damaged or encrypted, an OSError or
            ArrowException is raised.
        content: the bytes of the file, to be sliced.
    """
    metadata = file.metadata
    ends = [len(_MAGIC)]
    if metadata.num_row_groups:
        for column in _columns(file, metadata.num_row_groups - 1):
            first = min(filter(None, (column.dictionary_page_offset, column.data_page_offset)), default=0)
            ends.append(first + column.total_compressed_size)
    # The footer counts from the beginning of its own file, so the bytes before this file are missing in its offsets.
    missing = size - 2 * len(_MAGIC) - metadata.serialized_size - max(ends)
    return 2 * _MAGIC in content[: max(missing, 0) + len(_MAGIC)]


def _columns(file: Any, number: int) -> list[Any]:
    """The metadata of the columns of a row group."""
    # If these are damaged or encrypted, `column` ends the process. A reader raises an error; of no rows, it reads none.
    if file.metadata.num_columns:  # Without columns, the reader ends the process.
        list(file.reader.iter_batches(0, row_groups=[number], use_threads=False))
    group = file.metadata.row_group(number)
    return list(map(group.column, range(group.num_columns)))


def _open(file: MappedFile) -> tuple[Any, int]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    with damage_named(f"{file.source}, offset {file.size}: no Parquet file, or it is cut short"):
        content = pyarrow.BufferReader(pyarrow.py_buffer(file.array))
        # Threads share the file, but must not share a buffer of what is read ahead, which ends the process.
        found = ParquetFile(content, page_checksum_verification=True, pre_buffer=False)
        return found, _PARSED_FOOTER * found.metadata.serialized_size
