"""Rows of Arrow files, such as Hugging Face's `Dataset.save_to_disk` writes, by index through the memory map."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from libai_data.errors import ConfigError, FormatError
from libai_data.sources.arrow_columns import BatchRows, chosen_columns, import_pyarrow
from libai_data.sources.mapped_file import MappedFile
from libai_data.sources.sharded import Paths, ShardedSource, opened

_FILE_MAGIC = b"ARROW1"
_STATE, _SPLITS = "state.json", "dataset_dict.json"


class ArrowSource(ShardedSource):
    """The rows of Arrow IPC files, of the stream or the file format: dicts of Python values, as Arrow holds them.

    Nothing is decoded when they are opened but where the record batches lie.

    Args:
        paths: a folder written by `Dataset.save_to_disk`, or files, globs or folders; see `storage.listed`.
        columns: names of those to read; by default all.

    Raises:
        ConfigError: There is no such file or column, the folder holds several splits, or pyarrow is not installed.
        FormatError: A file is cut short or damaged, or no Arrow file.
    """

    def __init__(self, paths: Paths, columns: Sequence[str] | None = None) -> None:
        import_pyarrow("ArrowSource")
        files = opened(_files_of_dataset(paths) or paths)
        super().__init__(files, [_Shard(file, columns) for file in files], columns)


def _files_of_dataset(paths: Paths) -> list[str] | None:
    """The files of a folder that holds a dataset; None for other paths."""
    folder = Path(paths) if isinstance(paths, (str, Path)) else Path()
    if not isinstance(paths, (str, Path)) or not folder.is_dir():
        return None
    if (folder / _SPLITS).is_file():
        splits = json.loads((folder / _SPLITS).read_text("utf-8")).get("splits", [])
        raise ConfigError(f"{folder} holds several splits; name the folder of one: {[str(folder / n) for n in splits]}")
    if not (folder / _STATE).is_file():
        return None
    try:
        state = json.loads((folder / _STATE).read_text("utf-8"))
        names = [str(folder / file["filename"]) for file in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{folder / _STATE} does not name the files of a dataset: {error!r}") from error
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise ConfigError(f"{folder} was saved with an order of its own by an old version of datasets; save it again")
    return names


class _Shard:
    def __init__(self, file: MappedFile, columns: Sequence[str] | None) -> None:
        self._file, self._asked = file, columns
        self._opened: tuple[int, Any] = (0, None)
        self._ends = np.cumsum([len(batch) for batch in self._batches()[0]], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The records of these rows, in this order."""
        import pyarrow

        asked = np.asarray(rows, np.int64)
        numbers = np.searchsorted(self._ends, asked, side="right")
        batches, readers = self._batches()
        found: list[Any] = [None] * len(asked)
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            first = int(self._ends[number - 1]) if number else 0
            try:
                if number not in readers:
                    batches[number].validate(full=True)
                    readers[number] = BatchRows(batches[number], self._columns)
                records = readers[number].read(asked[places] - first)
            except (pyarrow.ArrowException, ValueError, OSError) as error:
                raise FormatError(
                    f"{self._file.source}, record {first}: record batch {number} cannot be read: {error}"
                ) from error
            for place, record in zip(places.tolist(), records):
                found[place] = record
        return found

    def _batches(self) -> tuple[list[Any], dict[int, BatchRows]]:
        """The record batches, and what reads those that were read, in this process."""
        process, opened = self._opened
        if process != os.getpid():
            table, batches = _open(self._file)
            self._columns = chosen_columns(table.names, self._asked, self._file.source)
            opened = batches, {}
            self._opened = os.getpid(), opened
        found: tuple[list[Any], dict[int, BatchRows]] = opened
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": (0, None)}


def _open(file: MappedFile) -> tuple[Any, list[Any]]:
    import pyarrow

    batches: list[Any] = []
    try:
        content = pyarrow.py_buffer(file.array)
        if file.bytes[: len(_FILE_MAGIC)] == _FILE_MAGIC:
            reader = pyarrow.ipc.open_file(content)
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        else:
            reader = pyarrow.ipc.open_stream(content)
            batches = list(reader)
            _check_end(file, batches)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise FormatError(
            f"{file.source}, record batch {len(batches)}: no Arrow file, or cut short: {error}"
        ) from error
    return reader.schema, batches


def _check_end(file: MappedFile, batches: Sequence[Any]) -> None:
    """A stream without its end, of eight bytes, may have lost batches."""
    if file.bytes[-8:] != b"\xff\xff\xff\xff\0\0\0\0":
        raise ValueError(f"the stream of {len(batches)} batches ends at {file.size} without the mark of its end")
