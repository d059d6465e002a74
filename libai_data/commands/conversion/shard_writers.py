"""Writers of shards: a writer writes records to a file, and returns what a source must read from the file.

A writer is made with a path and the result of `schema_of`. `write(records, first)` writes records, from index `first`
on, and returns them as a source of the format must read them; it raises SchemaError if the format cannot store one.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, NamedTuple, Union

import numpy as np

from libai_data.data.sources.array_record import ArrayRecordSource, array_record_module
from libai_data.data.sources.arrow_columns import import_pyarrow
from libai_data.data.sources.packed_record import pack_record
from libai_data.data.sources.parquet import ParquetSource
from libai_data.data.sources.webdataset import WebDatasetSource, key_and_ending
from libai_data.errors import SchemaError

_ROW_GROUP = 4096
_ROW_GROUP_BYTES = 1 << 27  # A reader decodes a whole group, and cannot read a column above 2 GiB.
_MISSING = object()
_MAY_HAVE_BOOLS = {bool, list, tuple, dict}
# WebDataset decodes files with these endings as integers.
_WHOLE_NUMBERS = ("cls", "cls2", "class", "count", "index", "inx", "id")


class _ArrayRecord:
    """Writes bytes unchanged and dicts packed. Each group has one record, so each record can be read alone."""

    def __init__(self, path: Path, schema: Any) -> None:
        self._writer = array_record_module("writing ArrayRecord").ArrayRecordWriter(str(path), "group_size:1")

    def write(self, records: Sequence[Any], first: int) -> list[Any]:
        packed = [record if isinstance(record, bytes) else pack_record(record) for record in records]
        for record in packed:
            self._writer.write(record)
        return packed

    def close(self) -> None:
        self._writer.close()


class _WebDataset:
    """Writes a file for each field, with the ending of its type. The same records give the same bytes."""

    def __init__(self, path: Path, schema: Any) -> None:
        self._file = tarfile.open(path, "w", format=tarfile.PAX_FORMAT)  # noqa: SIM115
        self._keys: set[str] = set()

    def write(self, records: Sequence[Any], first: int) -> list[Any]:
        return [self._write(record, index) for index, record in enumerate(records, first)]

    def _write(self, record: Any, index: int) -> dict[str, Any]:
        fields = {"bin": record} if isinstance(record, bytes) else dict(record)
        key = str(fields.pop("__key__", f"{index:09d}"))
        is_read = key_and_ending(f"{key}.x") == (key, "x")
        if not is_read or key.startswith(("/", "./")) or ".." in key.split("/") or "\0" in key:
            raise SchemaError(
                f"the key {key!r} cannot be a key of WebDataset: it must be a relative path, without './' at its "
                "beginning, without a dot in its last part and not in a folder such as '__meta__'"
            )
        # A reader would make one sample of two records with one key, and none of a record without fields.
        if key in self._keys or not fields:
            why = "has no field" if not fields else "has the key of an earlier one"
            raise SchemaError(f"record {index} (key {key!r}) {why}; WebDataset cannot store it")
        self._keys.add(key)
        found: dict[str, Any] = {"__key__": key}
        for name, value in fields.items():
            ending, content = _as_file(name, value)
            if ending in found or "/" in ending or "\0" in ending or not ending:
                raise SchemaError(
                    f"field {name!r} would be a file with the ending {ending!r}, which is empty, contains '/' or a "
                    "zero byte, or is in use; rename the field"
                )
            info = tarfile.TarInfo(f"{key}.{ending}")
            info.size = len(content)
            self._file.addfile(info, io.BytesIO(content))
            found[ending] = content
        return found

    def close(self) -> None:
        self._file.close()


def _as_file(name: str, value: Any) -> tuple[str, bytes]:
    """The ending and the content of a field's file, which WebDataset decodes to the field's value."""
    ending = name.lower()
    if isinstance(value, bytes):
        return ending, bytes(value)  # not numpy's own class
    if type(value) is int and ending in _WHOLE_NUMBERS:
        return ending, str(value).encode()
    if isinstance(value, str):
        return ending if ending.split(".")[-1] == "txt" else f"{ending}.txt", value.encode("utf-8", "surrogatepass")
    if isinstance(value, (np.ndarray, np.generic)):
        content = io.BytesIO()
        np.save(content, np.asarray(value), allow_pickle=False)
        return f"{ending}.npy", content.getvalue()
    try:
        return f"{ending}.json", json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise SchemaError(f"field {name!r} has a value that JSON cannot store: {error}") from error


class _Parquet:
    """Writes a column for each field; a record of bytes is the column "record". Pages have checksums."""

    def __init__(self, path: Path, schema: Any) -> None:
        self._pyarrow = import_pyarrow("writing Parquet")
        from pyarrow.parquet import ParquetWriter

        self._writer = ParquetWriter(str(path), schema, write_page_checksum=True)
        self._schema = schema
        self._rows: list[Any] = []

    def write(self, records: Sequence[Any], first: int) -> list[Any]:
        rows = [as_row(record) for record in records]
        # Arrow would drop unknown fields silently.
        unknown = sorted({name for row in rows for name in row} - set(self._schema.names))
        if unknown:
            raise SchemaError(
                f"they have the fields {unknown}, which the first records do not have; these have {self._schema.names}"
            )
        try:
            table = self._pyarrow.Table.from_pylist(rows, schema=self._schema)
        except (self._pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise SchemaError(
                f"they do not fit the columns {self._schema.names} of the first records: {error}"
            ) from error
        written: list[Any] = table.to_pylist()
        # Arrow also drops unknown fields of nested dicts, and rounds floats in a column of ints.
        for index, (row, kept) in enumerate(zip(rows, written), first):
            if changed := _changed(row, kept, ""):
                raise SchemaError(
                    f"record {index} {changed}, by the columns of the first records; write all records in one form, or "
                    "convert to another format"
                )
        self._rows.append(table)
        if sum(map(len, self._rows)) >= _ROW_GROUP or sum(each.nbytes for each in self._rows) >= _ROW_GROUP_BYTES:
            self._flush()
        return written

    def _flush(self) -> None:
        if self._rows:
            table = self._pyarrow.concat_tables(self._rows)
            groups = 1 + table.nbytes // _ROW_GROUP_BYTES
            self._writer.write_table(table, row_group_size=-(-len(table) // groups))
            self._rows = []

    def close(self) -> None:
        self._flush()
        self._writer.close()


def _changed(value: Any, kept: Any, path: str) -> str:
    """What Arrow changed of a value when it stored `kept`, in words; "" if only fields without a value were added."""
    value = value.tolist() if hasattr(value, "tolist") else value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    # In a column of floats, Arrow stores True as 1.0, and these are equal.
    may_have_bools = not _MAY_HAVE_BOOLS.isdisjoint(map(type, parts)) and not isinstance(kept, bool)
    with suppress(ValueError):  # Lists of numpy arrays cannot be compared.
        if value == kept and not may_have_bools:
            return ""
    if isinstance(value, dict) and isinstance(kept, dict):
        pairs = [(f"{path}.{name}" if path else name, each, kept.get(name, _MISSING)) for name, each in value.items()]
    elif isinstance(value, (list, tuple)) and isinstance(kept, list) and len(value) == len(kept):
        pairs = [(path, each, other) for each, other in zip(value, kept)]
    elif kept is _MISSING:
        return "" if value is None else f"would lose its field {path!r}"
    elif value != value and kept != kept:  # NaN
        return ""
    else:
        return f"would have {kept!r:.100} instead of {value!r:.100} in its field {path!r}"
    return next(filter(None, (_changed(each, other, name) for name, each, other in pairs)), "")


def as_row(record: Any) -> dict[str, Any]:
    """A record as a row for Arrow."""
    if isinstance(record, bytes):
        return {"record": record}
    return {name: _as_cell(name, value) for name, value in record.items()}


def _as_cell(name: str, value: Any) -> Any:
    if not hasattr(value, "tolist"):
        return value
    array = np.asarray(value)
    # Python has no times below microseconds, so they would become ints. Rows of a structured dtype would lose names.
    are_times = array.dtype.kind in "mM"
    if array.dtype.names or (are_times and any(isinstance(each, int) for each in array.ravel().tolist())):
        raise SchemaError(
            f"the field {name!r} has values of the dtype {array.dtype}, which no column of Parquet keeps; cast them, "
            "such as to 'datetime64[us]' or numbers, or convert to another format"
        )
    return value.tolist()


def schema_of(to: str, first_records: Callable[[], Sequence[Any]]) -> Any:
    """The schema that all shards must have: for Parquet the columns of the first records; None for other formats."""
    if to != "parquet":
        return None
    pyarrow = import_pyarrow("writing Parquet")
    from pyarrow.parquet import ParquetWriter

    rows = [as_row(record) for record in first_records()]
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not names:
        raise SchemaError(f"the first {len(rows)} records have no fields; Parquet cannot store them")
    fields = []
    for name in names:
        try:
            fields.append((name, pyarrow.array([row.get(name) for row in rows]).type))
            # Some types cannot be written, such as structs without fields.
            ParquetWriter(pyarrow.BufferOutputStream(), pyarrow.schema(fields[-1:])).close()
        except (pyarrow.ArrowException, OSError, TypeError, ValueError, OverflowError) as error:
            raise SchemaError(
                f"the field {name!r} of the first {len(rows)} records fits no column of Parquet: {error}; convert to "
                "another format"
            ) from error
    return pyarrow.schema(fields)


class ShardFormat(NamedTuple):
    """A format of shards: the ending of its files, their writer, and the source that reads them."""

    ending: str
    writer: type[Union[_ArrayRecord, _WebDataset, _Parquet]]
    source: Any


FORMATS: dict[str, ShardFormat] = {
    "array_record": ShardFormat("array_record", _ArrayRecord, ArrayRecordSource),
    "webdataset": ShardFormat("tar", _WebDataset, WebDatasetSource),
    "parquet": ShardFormat("parquet", _Parquet, ParquetSource),
}
