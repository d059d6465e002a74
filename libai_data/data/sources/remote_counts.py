"""Counts the records of a store's file without fetching all of it: reads only ranges with its footer or headers."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable

from libai_data.data.sources.array_record import array_record_module
from libai_data.data.sources.remote import RemoteFile, read_ranges
from libai_data.errors import ConfigError, error_text, installed

_HEADER, _MANY_HEADERS = 1 << 12, 1 << 16
_TAIL, _MORE = 1 << 18, 8
_RECORD_BATCH, _END = 3, 0


def count_by_ranges(kind: str, remote: RemoteFile, attempts: int) -> int | None:
    """The number of records of a file; None if the format or the file does not store this number. Errors are those of
    `read_ranges`, or a ConfigError if the package for the format is not installed."""
    if kind not in _COUNTERS or not remote.size:
        return None
    size = remote.size
    return read_ranges(remote.url, lambda file: _COUNTERS[kind](file, size), attempts)


def _of_parquet(file: Any, size: int) -> int:
    pyarrow_parquet = installed("pyarrow.parquet", "the footer of a Parquet file", "'libai_data[records]'")
    return int(pyarrow_parquet.ParquetFile(file).metadata.num_rows)


def _of_array_record(file: Any, size: int) -> int | None:
    """Count with the package array_record. It reads only the end, so a sparse file with this end is sufficient."""
    module = array_record_module("the footer of an ArrayRecord file")
    with _temporary():
        end = tempfile.NamedTemporaryFile(suffix=".array_record")  # noqa: SIM115
    with end:
        tail = _TAIL
        while True:
            tail = min(tail, size)
            file.seek(size - tail)
            read = file.read(tail)
            with _temporary():
                end.truncate(size)
                end.seek(size - tail)
                end.write(read)
                end.flush()
            reader = module.ArrayRecordReader(end.name, options="readahead_buffer_size:0")
            if reader.ok():
                return int(reader.num_records())
            if tail == size:
                return None
            tail *= _MORE


@contextmanager
def _temporary() -> Iterator[None]:
    """Wraps the use of a temporary file, because an error of the store would be retried, or say that a file is gone."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"a temporary file cannot be written ({error_text(error)}); set TMPDIR to a folder with some room"
        ) from error


def _of_arrow(file: Any, size: int) -> int | None:
    """Count from the headers of the messages, which the file format and the stream format both have.

    Format: arrow.apache.org/docs/format/Columnar.html, "Encapsulated message format"; headers are flatbuffers.
    """
    window, begin, body = b"", 0, 0

    def read(place: int, count: int) -> bytes:
        nonlocal window, begin
        if not begin <= place <= place + count <= begin + len(window):
            file.seek(place)
            window, begin = file.read(max(count, _HEADER if body > _MANY_HEADERS else _MANY_HEADERS)), place
        return window[place - begin : place - begin + count]

    place, rows = 8 if read(0, 6) == b"ARROW1" else 0, 0
    while place + 8 <= size:
        mark, length = struct.unpack("<Ii", read(place, 8))
        if mark != 0xFFFFFFFF or length < 0:
            return None
        if length == _END:
            return rows
        header = _Table(read(place + 8, length), None)
        if header.number(1, "<B") == _RECORD_BATCH:
            rows += header.table(2).number(0, "<q")
        body = header.number(3, "<q")
        place += 8 + length + body
    return None


class _Table:
    """A table of a flatbuffer; its fields are read by their numbers."""

    def __init__(self, content: bytes, place: int | None) -> None:
        self._content = content
        self._place = struct.unpack_from("<I", content, 0)[0] if place is None else place
        self._fields = self._place - struct.unpack_from("<i", content, self._place)[0]

    def _offset(self, field: int) -> int:
        size = struct.unpack_from("<H", self._content, self._fields)[0]
        entry = 4 + 2 * field
        return int(struct.unpack_from("<H", self._content, self._fields + entry)[0]) if entry < size else 0

    def number(self, field: int, kind: str) -> int:
        """The number in a field; 0 if the table leaves it out."""
        offset = self._offset(field)
        return int(struct.unpack_from(kind, self._content, self._place + offset)[0]) if offset else 0

    def table(self, field: int) -> _Table:
        """The table in a field."""
        place = self._place + self._offset(field)
        return _Table(self._content, place + struct.unpack_from("<I", self._content, place)[0])


_COUNTERS: dict[str, Callable[[Any, int], int | None]] = {
    "parquet": _of_parquet,
    "array_record": _of_array_record,
    "arrow": _of_arrow,
}
