"""Rows of Arrow files, such as those of Hugging Face's `Dataset.save_to_disk`, read by index from a memory map."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, NamedTuple

import numpy as np

from libai_data.data.json_text import parsed_json
from libai_data.data.sources.arrow_columns import BatchedShard, BatchRows, FileColumns, damage_named, import_pyarrow
from libai_data.data.sources.last_used import LastUsed
from libai_data.data.sources.mapped_file import MappedFile
from libai_data.data.sources.paths import is_file, text_of
from libai_data.data.sources.sharded import Paths, ShardedSource, opened
from libai_data.errors import ConfigError, FormatError
from libai_data.errors.argument_rules import check_types, whole

# Approximate bytes of the Python objects for one record batch.
_OBJECTS = 2000
_FILE_MAGIC = b"ARROW1"
_MESSAGES_BEGIN, _END_MARK, _TRAILER = 8, 8, 10
_STATE, _SPLITS = "state.json", "dataset_dict.json"
_UNREADABLE = "cannot be read, or the file is cut short"


class ArrowSource(ShardedSource):
    """The rows of Arrow IPC files, in the stream or the file format: dicts of Python values, as Arrow stores them.

    Opening a file finds its record batches. Compressed batches are decompressed when they are read, and the last used
    batches are cached.

    Args:
        paths: a folder written by `Dataset.save_to_disk`, or files, globs or folders; see `storage.listed`.
        columns: names of the columns to read; by default all.
        cache_bytes: size of the cache of decompressed record batches, for all files together, in each process. One
            batch is cached even if it is larger.

    Attributes:
        schema: the `pyarrow.Schema` of the first file with rows; None if no file has rows.

    Raises:
        ConfigError: There is no such file or column, the folder has several splits, or pyarrow is not installed.
        FormatError: A file is cut short or damaged, or no Arrow file.
        SchemaError: The columns that are read differ between the files.
    """

    def __init__(self, paths: Paths, columns: Sequence[str] | None = None, cache_bytes: int = 256 << 20) -> None:
        check_types(ArrowSource, locals(), {"cache_bytes": whole(0)})
        import_pyarrow("ArrowSource")
        files, kept = opened(_files_of_dataset(paths) or paths), LastUsed(cache_bytes)
        chosen = FileColumns(columns)
        super().__init__(files, [ArrowShard(file, chosen, kept) for file in files], columns)
        self.schema = chosen.first


def _files_of_dataset(paths: Paths) -> list[str] | None:
    """The files of a folder that `Dataset.save_to_disk` wrote; None for other paths."""
    folder = Path(paths) if isinstance(paths, (str, Path)) else Path()
    if not isinstance(paths, (str, Path)) or not os.path.isdir(folder):
        return None
    if is_file(folder / _SPLITS):
        splits = sorted(str(each.parent) for each in folder.glob(f"*/{_STATE}"))
        raise ConfigError(f"{folder} holds several splits; name the folder of one: {splits}")
    if not is_file(folder / _STATE):
        return None
    try:
        state = parsed_json(text_of(folder / _STATE))
        names = [str(folder / file["filename"]) for file in state["_data_files"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{folder / _STATE} does not name the files of a dataset: {error!r}") from error
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise ConfigError(f"{folder} was saved with its own order by an old version of datasets; save it again")
    return names


class ArrowShard(BatchedShard):
    """The rows of one file; see `ArrowSource`."""

    def __init__(self, file: MappedFile, columns: FileColumns, kept: LastUsed) -> None:
        super().__init__(file, kept)
        batches = self._batches()
        with damage_named(f"{file.source}, record batch 0 {_UNREADABLE}"):
            self._ends = np.cumsum([len(batches.get(number)) for number in range(batches.total)], dtype=np.int64)
        self._columns = columns.chosen(file.source, batches.schema, len(self))

    def _decoded(self, number: int) -> tuple[BatchRows, int]:
        where = f"{self._file.source}, record {self._first(number)}: record batch {number}"
        with damage_named(f"{where} {_UNREADABLE}"):
            batch = self._batches().get(number)
            batch.validate(full=True)
            return BatchRows(batch, self._columns), _OBJECTS + _own_bytes([batch], self._file)

    def _batches(self) -> _Batches:
        """The record batches of the file, opened in this process."""
        return self._kept.made(self._file.source, lambda: _open(self._file))


class _Batches(NamedTuple):
    """The record batches of a file; `get` reads and decompresses one."""

    schema: Any
    total: int
    get: Callable[[int], Any]


def _open(file: MappedFile) -> tuple[_Batches, int]:
    """The batches of a file, and the bytes of memory that they need while cached."""
    import pyarrow

    with damage_named(f"{file.source}, no Arrow file: it {_UNREADABLE}"):
        content = pyarrow.py_buffer(file.array)
        if file.bytes[: len(_FILE_MAGIC)] == _FILE_MAGIC:
            reader = pyarrow.ipc.open_file(content)
            _check_one_file(content, file)
            if reader.num_record_batches:
                reader.get_batch(0)  # The first read also reads the dictionaries, which threads must not do at once.
            return _Batches(reader.schema, reader.num_record_batches, reader.get_batch), _OBJECTS
        stream = pyarrow.BufferReader(content)
        messages = list(pyarrow.ipc.MessageReader.open_stream(stream))
        schema = pyarrow.ipc.open_stream(content).schema
        if any(message.type == "dictionary" for message in messages):
            # To decode a batch, Arrow needs all dictionaries before it.
            batches = list(pyarrow.ipc.open_stream(content))
            found = _Batches(schema, len(batches), batches.__getitem__)
            size = _own_bytes(batches, file)
        else:
            found = _Batches(
                schema,
                len(messages) - 1,
                lambda number: pyarrow.ipc.read_record_batch(messages[number + 1], schema),
            )
            size = 0
        # Without the mark of the end, eight bytes, batches may be missing.
        if file.bytes[-8:] != b"\xff\xff\xff\xff\0\0\0\0":
            raise ValueError(f"the stream of {found.total} batches ends at {file.size} without the mark of its end")
        if stream.tell() < file.size:
            raise ValueError(f"more data follows the end of the stream at {stream.tell()}; write one stream to a file")
        return found, size + _OBJECTS * (1 + found.total)


def _check_one_file(content: Any, file: MappedFile) -> None:
    """Refuse files that were joined by `cat`: the last footer would be used for the batches of the first file."""
    import pyarrow

    stream, end = pyarrow.BufferReader(content), _MESSAGES_BEGIN
    stream.seek(end)
    with suppress(pyarrow.ArrowException):  # If the mark of the end is missing, the footer is parsed as a message.
        for _ in pyarrow.ipc.MessageReader.open_stream(stream):
            end = stream.tell()
    footer = file.size - _TRAILER - int.from_bytes(file.bytes[-_TRAILER : -len(_FILE_MAGIC)], "little")
    if footer > end + _END_MARK:
        raise ValueError(f"more data follows its last batch at {end}, such as a second file; write one file to a file")


def _own_bytes(batches: Sequence[Any], file: MappedFile) -> int:
    """Bytes of the batches' buffers outside of the file's memory map."""
    begin = file.array.__array_interface__["data"][0]
    buffers = [buffer for batch in batches for column in batch.columns for buffer in column.buffers() if buffer]
    return sum(buffer.size for buffer in buffers if not begin <= buffer.address < begin + file.size)
