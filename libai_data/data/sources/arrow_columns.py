"""Rows of Arrow tables as dicts, faster than by Arrow's own conversion, which makes a scalar of each value first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from libai_data.errors import ConfigError, nearest

Values = Callable[[np.ndarray], list[Any]]


def import_pyarrow(whom: str) -> Any:
    """The package pyarrow.

    Args:
        whom: what needs it, for the error.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        raise ConfigError(f"{whom} needs the package pyarrow: pip install 'libai_data[records]'") from error
    return pyarrow


class BatchRows:
    """The rows of one record batch.

    Args:
        batch: a `pyarrow.RecordBatch`.
        columns: names of those that are wanted.
    """

    def __init__(self, batch: Any, columns: Sequence[str]) -> None:
        self._columns: dict[str, Values] = {name: _values_of(batch.column(name)) for name in columns}

    def read(self, rows: np.ndarray) -> list[dict[str, Any]]:
        """Rows as dicts of Python values, in this order.

        Args:
            rows: int64 [n].
        """
        names = list(self._columns)
        columns = [values(rows) for values in self._columns.values()]
        return [dict(zip(names, row)) for row in zip(*columns)] if names else [{} for _ in rows]


def read_rows(ends: np.ndarray, rows: Sequence[int], batch_of: Callable[[int], BatchRows]) -> list[dict[str, Any]]:
    """Rows of several batches, in the order of `rows`; each batch is asked for once.

    Args:
        ends: int64 [batches], how many rows there are up to the end of each.
        rows: counted over all batches.
        batch_of: gives a batch by its number.
    """
    asked = np.asarray(rows, np.int64)
    numbers = np.searchsorted(ends, asked, side="right")
    found: list[Any] = [None] * len(asked)
    for number in np.unique(numbers).tolist():
        places = np.flatnonzero(numbers == number)
        first = int(ends[number - 1]) if number else 0
        for place, record in zip(places.tolist(), batch_of(number).read(asked[places] - first)):
            found[place] = record
    return found


def _values_of(column: Any) -> Values:
    """What gives the values of a column at some rows."""
    import pyarrow as pa

    kind = column.type
    if not column.null_count and len(column):
        if pa.types.is_binary(kind) or pa.types.is_string(kind):
            return _bytes_of(column, np.int32, pa.types.is_string(kind))
        if pa.types.is_large_binary(kind) or pa.types.is_large_string(kind):
            return _bytes_of(column, np.int64, pa.types.is_large_string(kind))
        if pa.types.is_integer(kind) or pa.types.is_float64(kind) or pa.types.is_float32(kind):
            numbers = column.to_numpy(zero_copy_only=True)
            return lambda rows: list(numbers[rows].tolist())
    return lambda rows: list(column.take(pa.array(rows)).to_pylist())


def _bytes_of(column: Any, offset_type: Any, text: bool) -> Values:
    _, offset_buffer, data = column.buffers()
    offsets = np.frombuffer(offset_buffer, offset_type)[column.offset : column.offset + len(column) + 1]
    content = memoryview(data) if data is not None else memoryview(b"")
    make: Any = (lambda piece: str(piece, "utf-8")) if text else bytes

    def values(rows: np.ndarray) -> list[Any]:
        return [make(content[start:stop]) for start, stop in zip(offsets[rows].tolist(), offsets[rows + 1].tolist())]

    return values


def chosen_columns(known: Sequence[str], columns: Any, path: Any) -> list[str]:
    """The columns that are read: those that were asked for, or all.

    Raises:
        ConfigError: There is no such column.
    """
    for name in columns or ():
        if name not in known:
            raise ConfigError(f"{path} has no column {name!r}; there are {list(known)}.{nearest(name, known)}")
    return list(known if columns is None else columns)
