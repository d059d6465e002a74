"""Rows of Arrow tables as dicts; faster than Arrow's own conversion, which first makes a scalar of each value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable

import numpy as np

from libai_data.data.sources.column_names import chosen_columns, columns_differ
from libai_data.data.sources.last_used import LastUsed
from libai_data.data.sources.mapped_file import MappedFile
from libai_data.data.sources.sharded import runs_of
from libai_data.errors import FormatError, installed

Values = Callable[[np.ndarray], list[Any]]
_OF_VIEWS = {"string_view": "large_string", "binary_view": "large_binary"}


def import_pyarrow(whom: str) -> Any:
    """The package pyarrow; `whom` names the user of the package in the error if it is not installed."""
    return installed("pyarrow", whom, "'libai_data[records]'")


@contextmanager
def damage_named(where: str) -> Iterator[None]:
    """Raise an error of Arrow in the block as a FormatError that begins with `where`."""
    import pyarrow

    try:
        yield
    except FormatError:
        raise
    except (pyarrow.ArrowException, ValueError, OSError) as error:
        raise FormatError(f"{where}: {error}") from error


class BatchRows:
    """The rows of one record batch."""

    def __init__(self, batch: Any, columns: Sequence[str]) -> None:
        self._columns: dict[str, Values] = {name: _values_of(batch.column(name)) for name in columns}

    def read(self, rows: np.ndarray) -> list[dict[str, Any]]:
        """Rows as dicts of Python values, in this order."""
        names = list(self._columns)
        columns = [values(rows) for values in self._columns.values()]
        return [dict(zip(names, row)) for row in zip(*columns)] if names else [{} for _ in rows]


class BatchedShard:
    """The rows of a file of batches. Each batch is decoded as a whole, and stays in the cache while there is room."""

    _ends: np.ndarray
    """Rows up to the end of each batch, int64 [batches]."""

    def __init__(self, file: MappedFile, kept: LastUsed) -> None:
        self._file, self._kept = file, kept

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The records of these rows, in this order; each batch is fetched once."""
        found: list[Any] = [None] * len(rows)
        for number, places, own in runs_of(self._ends, np.asarray(rows, np.int64)):
            batch = self._kept.made((self._file.source, number), partial(self._decoded, number))
            try:
                records = batch.read(own)
            except Exception as error:  # Dates after the year 9999, unknown time zones and others raise many kinds.
                if len(rows) > 1:
                    return [record for row in rows for record in self.read([row])]
                raise FormatError(
                    f"{self._file.source}, record {rows[0]}: Python has no value like one of these: {error}; read the "
                    "other columns (columns=[...])"
                ) from error
            for place, record in zip(places.tolist(), records):
                found[place] = record
        return found

    def _first(self, number: int) -> int:
        """The first row of a batch."""
        return int(self._ends[number - 1]) if number else 0

    def _decoded(self, number: int) -> tuple[BatchRows, int]:
        """A decoded batch, and the bytes of memory that it needs while cached."""
        raise NotImplementedError


def _values_of(column: Any) -> Values:
    """A function that returns the values of a column at given rows.

    This avoids `to_numpy` and `pa.array`: they import pandas if it is installed, and workers would start more slowly.
    """
    import pyarrow as pa

    # Arrow cannot select rows of views, which Polars writes.
    column = column.cast(_OF_VIEWS[str(column.type)]) if str(column.type) in _OF_VIEWS else column
    kind = column.type
    if not column.null_count and len(column):
        if pa.types.is_binary(kind) or pa.types.is_string(kind):
            return _bytes_of(column, np.int32, pa.types.is_string(kind))
        if pa.types.is_large_binary(kind) or pa.types.is_large_string(kind):
            return _bytes_of(column, np.int64, pa.types.is_large_string(kind))
        if pa.types.is_integer(kind) or pa.types.is_float64(kind) or pa.types.is_float32(kind):
            dtype = np.dtype({"float": "f4", "double": "f8"}.get(str(kind), str(kind)))
            numbers = np.frombuffer(column.buffers()[1], dtype)[column.offset : column.offset + len(column)]
            return lambda rows: list(numbers[rows].tolist())
    exact = _in_microseconds(kind) if "time64[ns]" in str(kind) else kind
    if "time64[ns]" in str(exact):
        return partial(_refuse_nanoseconds, kind)
    try:
        column.take(pa.nulls(0, pa.int64()))
    except pa.ArrowNotImplementedError:  # such as views within lists, and run-end encoded values
        return lambda rows: [column[row].as_py() for row in rows.tolist()]

    def values(rows: np.ndarray) -> list[Any]:
        numbers = np.ascontiguousarray(rows, np.int64)
        places = pa.Array.from_buffers(pa.int64(), len(rows), [None, pa.py_buffer(numbers)])
        found = column.take(places)
        return list((found if kind == exact else found.cast(exact)).to_pylist())

    return values


def _refuse_nanoseconds(kind: Any, rows: np.ndarray) -> list[Any]:
    raise ValueError(f"the nanoseconds within {kind} would be cut off")


def _in_microseconds(kind: Any) -> Any:
    """A type, with times of microseconds instead of nanoseconds.

    Python's times have microseconds. Arrow would drop the nanoseconds, but its cast raises an error. Arrow has no cast
    for unions, run-end encoded values and views of lists.
    """
    import pyarrow as pa

    if kind == pa.time64("ns"):
        return pa.time64("us")
    if pa.types.is_dictionary(kind):
        return _in_microseconds(kind.value_type)
    fields = [field.with_type(_in_microseconds(field.type)) for field in map(kind.field, range(kind.num_fields))]
    if pa.types.is_map(kind):
        return pa.map_(*fields[0].type)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(fields[0], kind.list_size)
    if pa.types.is_struct(kind):
        return pa.struct(fields)
    make = {"list": pa.list_, "large_list": pa.large_list}.get(str(kind).partition("<")[0])
    return make(fields[0]) if make else kind


def _bytes_of(column: Any, offset_type: Any, text: bool) -> Values:
    _, offset_buffer, data = column.buffers()
    offsets = np.frombuffer(offset_buffer, offset_type)[column.offset : column.offset + len(column) + 1]
    content = memoryview(data) if data is not None else memoryview(b"")
    make: Any = (lambda piece: str(piece, "utf-8")) if text else bytes

    def values(rows: np.ndarray) -> list[Any]:
        return [make(content[start:stop]) for start, stop in zip(offsets[rows].tolist(), offsets[rows + 1].tolist())]

    return values


class FileColumns:
    """The columns to read, by default all. All files with rows must have the same, with values of one kind."""

    def __init__(self, columns: Sequence[str] | None) -> None:
        self._columns = columns
        self._first: Any = None

    @property
    def first(self) -> Any:
        """The `pyarrow.Schema` of the first file with rows; None before this file is read."""
        return self._first

    def chosen(self, path: str, schema: Any, rows: int) -> list[str]:
        """Names of the columns to read from the next file, which has so many rows.

        A ConfigError if a column is unknown; a FormatError if a name is damaged, or of several columns; a SchemaError
        if the columns differ from those of the first file with rows.
        """
        try:
            names = chosen_columns(schema.names, self._columns, path)
        except UnicodeDecodeError as error:
            raise FormatError(f"{path} is damaged: the name of a column is not UTF-8: {error}") from error
        if not rows:
            return names
        if self._first is None:
            self._types, self._path, self._names = {name: schema.field(name).type for name in names}, path, names
            self._first = schema  # Last: another thread may open the next streamed file meanwhile.
        elif schema.equals(self._first):
            return self._names  # One list for all files: there may be many thousands.
        else:
            types = {name: schema.field(name).type for name in names}
            both = {**self._types, **types}
            differ = [name for name in both if not _are_alike(self._types.get(name), types.get(name))]
            if differ:
                raise columns_differ(differ, path, types, self._path, self._types)
        return names


def _are_alike(one: Any, other: Any) -> bool:
    """Whether the values of two Arrow types are Python values of one kind. Nulls may be of any type, and structs may
    lack fields of each other."""
    import pyarrow as pa

    if one is None or other is None:  # A file does not have the column.
        return False
    one, other = (kind.value_type if pa.types.is_dictionary(kind) else kind for kind in (one, other))
    if pa.types.is_null(one) or pa.types.is_null(other):
        return True
    ours, theirs = map(_parts_of, (one, other))
    are_alike = all(_are_alike(ours[name], theirs[name]) for name in ours.keys() & theirs.keys())
    return are_alike and _kind_of(one) == _kind_of(other)


def _kind_of(kind: Any) -> tuple[str, bool]:
    """The kind of the Python values of a type, such as "int" for uint8: the name of the type without size and layout,
    and whether times have a time zone."""
    word = re.match(r"(?:large_|fixed_size_|u(?=int))?(extension.*|[a-z]+)", str(kind))[1]  # type: ignore[index]
    return {"halffloat": "float", "double": "float"}.get(word, word), getattr(kind, "tz", None) is None


def _parts_of(kind: Any) -> dict[Any, Any]:
    """The types within a type, by the names of a struct, or else by number."""
    import pyarrow as pa

    is_struct = pa.types.is_struct(kind)
    fields = map(kind.field, range(kind.num_fields))
    return {each.name if is_struct else number: each.type for number, each in enumerate(fields)}
