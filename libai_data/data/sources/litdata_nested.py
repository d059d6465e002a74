"""Lists and dicts that are a single value of a LitData sample: JSON, or since version 0.2.72 a binary form.

Format: github.com/Lightning-AI/litData, `_nested_dumps` in `src/litdata/streaming/serializers.py`.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Callable

import numpy as np

_FIRST_OF_JSON = 0x21
_JSON, _TEXTS, _INTS, _FLOATS, _BOOLS, _DICT, _DICTS = range(7)


def nested(data: bytes) -> Any:
    """Decode a value; raises a ValueError, IndexError or KeyError if the bytes are malformed."""
    if data[0] >= _FIRST_OF_JSON:
        return json.loads(data)
    reader = _Reader(data)
    value = reader.value()
    if reader.place != len(data):
        raise ValueError(f"{len(data) - reader.place} bytes are left")
    return value


class _Reader:
    """Reads consecutive values from bytes."""

    def __init__(self, data: bytes) -> None:
        self._data, self.place = data, 0

    def value(self) -> Any:
        """Read a value, which begins with a byte for its kind."""
        kind = self._bytes(1)[0]
        if kind in _SINGLE:
            return _SINGLE[kind](self)
        count = self._count()
        if kind == _JSON:
            return json.loads(self._bytes(count))
        if kind == _TEXTS:
            return [self.text() for _ in range(count)]
        if kind in (_INTS, _FLOATS):
            return np.frombuffer(self._bytes(8 * count), "<i8" if kind == _INTS else "<f8").tolist()
        if kind == _BOOLS:
            return list(map(bool, self._bytes(count)))
        if kind == _DICT:
            return {self.text(): self.value() for _ in range(count)}
        if kind != _DICTS:
            raise ValueError(f"there is no kind {kind} of values")
        names = [self.text() for _ in range(self._count())]
        if not names:
            raise ValueError("dicts have no names")
        return [{name: _SINGLE[self._bytes(1)[0]](self) for name in names} for _ in range(count)]

    def text(self) -> str:
        """Read a text, which begins with its size."""
        return str(self._bytes(self._count()), "utf-8")

    def number(self, kind: str) -> Any:
        """Read a number of eight bytes."""
        return struct.unpack(kind, self._bytes(8))[0]

    def flag(self) -> bool:
        """Read a bool of one byte."""
        return self._bytes(1) != b"\0"

    def _count(self) -> int:
        return int.from_bytes(self._bytes(4), "little")

    def _bytes(self, size: int) -> bytes:
        found = self._data[self.place : self.place + size]
        if len(found) != size:
            raise ValueError(f"{size} bytes should follow")
        self.place += size
        return found


_KINDS: list[Callable[[_Reader], Any]] = [
    _Reader.text,
    lambda reader: reader.number("<q"),
    lambda reader: reader.number("<d"),
    _Reader.flag,
    lambda reader: None,
]
# The numbers of these kinds differ between single values and dicts with equal names.
_SINGLE = {**dict(enumerate(_KINDS, 7)), **dict(enumerate([_KINDS[-1], *_KINDS[:-1]], 0x10))}
