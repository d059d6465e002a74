"""Decodes the values of LitData's samples; formats: `src/litdata/streaming/serializers.py` of LitData."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from libai_data.data.sources.litdata_nested import nested
from libai_data.data.sources.mds_values import Decode, image, number, pickled, pieces
from libai_data.errors import FormatError, nearest

# A dtype's place is its number in LitData; PyTorch has two names for some dtypes.
_FLOATS = ("float32", "float32", "float64", "float64", "complex64", "complex64", "complex128", "complex128", "float16")
_INTS = ("uint8", "int8", "int16", "int16", "int32", "int32", "int64", "int64", "bool", "uint16")
_OF_TORCH = (*_FLOATS, "float16", "bfloat16", *_INTS)
_OF_NUMPY = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"),
    *("complex64", "complex128", "bool"),
)


def decoder_of(encoding: str, what: str) -> Decode:
    """The function that decodes a value.

    Args:
        encoding: name, and details that all values have in common, such as "no_header_numpy:9".
        what: name of the column in errors.
    """
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
    "json": nested,
    "numpy": _arrays(_OF_NUMPY),
    "tensor": _arrays(_OF_TORCH),
}
