"""Decodes the values of LitData's samples.

Formats: github.com/Lightning-AI/litData, `src/litdata/streaming/serializers.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from libai_data.data.json_text import parsed_json
from libai_data.data.sources.described_source import Decode
from libai_data.data.sources.mds import image, number, pickled, pieces
from libai_data.errors import FormatError, nearest

# A dtype's place is its number in LitData; PyTorch has two names for some dtypes.
_FLOATS = ("float32", "float32", "float64", "float64", "complex64", "complex64", "complex128", "complex128", "float16")
_INTS = ("uint8", "int8", "int16", "int16", "int32", "int32", "int64", "int64", "bool", "uint16")
_OF_TORCH = (*_FLOATS, "float16", "bfloat16", *_INTS)
_OF_NUMPY = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"),
    *("complex64", "complex128", "bool"),
)

_FIRST_OF_JSON = 0x21
_JSON, _TEXT_LIST, _INT_LIST, _FLOAT_LIST, _BOOL_LIST, _DICT, _DICTS = range(7)


def decoder_of(encoding: str, what: str) -> Decode:
    """The function that decodes the values of an encoding, a name with details that all values have in common, such as
    "no_header_numpy:9"; `what` names the column in errors."""
    name, _, details = encoding.partition(":")
    if name in ("pickle", "graph"):
        raise pickled(what)
    if name in _VECTORS:
        try:
            dtype = _dtype(_VECTORS[name], int(details))
        except ValueError as error:
            raise FormatError(f"{what} is encoded as {encoding!r}: {error}; read the other columns") from error
        return lambda data: np.frombuffer(data, dtype)
    if name not in _DECODERS:
        known = [*_DECODERS, *_VECTORS]
        raise FormatError(f"{what} is encoded as {encoding!r}; known are {known}.{nearest(encoding, known)}")
    return _DECODERS[name]


def _dtype(names: Sequence[str], place: int) -> np.dtype[Any]:
    if not 0 <= place < len(names):
        raise ValueError(f"there is no dtype {place}")
    if names[place] == "bfloat16":
        raise ValueError("numpy has no bfloat16")
    return np.dtype(names[place]).newbyteorder("<")


def _arrays(names: Sequence[str]) -> Decode:
    """The decoder of arrays that begin with their dtype, and the number and sizes of their dims."""

    def decode(data: bytes) -> np.ndarray:
        # Newer versions write the header of tensors in big-endian order, so its first byte is 0. The first byte of the
        # older header is the number of a dtype, which begins at 1.
        numbers = ">u4" if names is _OF_TORCH and not data[0] else "<u4"
        kind, count = np.frombuffer(data[:8], numbers).tolist()
        end = 8 + 4 * count
        return np.frombuffer(data[end:], _dtype(names, kind)).reshape(np.frombuffer(data[8:end], numbers).tolist())

    return decode


def _nested(data: bytes) -> Any:
    """Decode a list or dict: JSON, or since version 0.2.72 a binary form (`_nested_dumps`).

    Raises a ValueError, IndexError or KeyError if the bytes are malformed.
    """
    if data[0] >= _FIRST_OF_JSON:
        return parsed_json(data)
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
            return parsed_json(self._bytes(count))
        if kind == _TEXT_LIST:
            return [self.text() for _ in range(count)]
        if kind in (_INT_LIST, _FLOAT_LIST):
            return np.frombuffer(self._bytes(8 * count), "<i8" if kind == _INT_LIST else "<f8").tolist()
        if kind == _BOOL_LIST:
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

_VECTORS = {"no_header_numpy": _OF_NUMPY, "no_header_tensor": _OF_TORCH}
_ENCODED = ("bytes", "jpeg", "image", "video", "audio", "nifti", "mesh", "pdf", "tifffile", "tiff", "file")
_DECODERS: dict[str, Decode] = {
    **dict.fromkeys(_ENCODED, bytes),
    **dict.fromkeys(("str", "text"), lambda data: str(data, "utf-8")),
    "bool": lambda data: bool(number("uint8")(data)),
    "int": number("int64"),
    "float": number("float64"),
    "pil": image,
    "jpeg_array": lambda data: pieces(data, 0),
    "json": _nested,
    "numpy": _arrays(_OF_NUMPY),
    "tensor": _arrays(_OF_TORCH),
}
