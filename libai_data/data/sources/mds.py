"""Samples of MDS shards, the format of MosaicML Streaming, by index.

Format of the values: github.com/mosaicml/streaming, `streaming/base/format/mds/encodings.py`.
"""

from __future__ import annotations

import re
from decimal import Decimal

import numpy as np

from libai_data.data.json_text import parsed_json
from libai_data.data.sources.described_source import Decode, DescribedSource, SampleShard
from libai_data.errors import FormatError, nearest

_NUMBERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_DTYPE_OF_NUMBER = dict(zip((8, 16, 32, 64, 9, 17, 33, 65, 18, 34, 66), _NUMBERS))


def decoder_of(encoding: str, what: str) -> Decode:
    """The function that decodes the values of an encoding, a name with details that all arrays have in common, such as
    "ndarray:float32:3,4"; `what` names the column in errors."""
    name, _, details = encoding.partition(":")
    if name == "ndarray":
        dtype, _, shape = details.partition(":")
        if (dtype and dtype not in _NUMBERS) or not re.fullmatch(r"(\d+(,\d+)*)?", shape, re.ASCII):
            raise FormatError(f"{what} is encoded as {encoding!r}; arrays have one of {_NUMBERS}, and ints as sizes")
        return _arrays(dtype, tuple(map(int, shape.split(","))) if shape else None)
    if encoding == "pkl":
        raise pickled(what)
    if encoding not in _DECODERS:
        known = [*_DECODERS, "ndarray"]
        raise FormatError(f"{what} is encoded as {encoding!r}; known are {known}.{nearest(encoding, known)}")
    return _DECODERS[encoding]


def pickled(what: str) -> FormatError:
    """The error for a column of pickled objects."""
    return FormatError(
        f"{what} contains pickled objects, which can run any code; read the other columns (columns=[...])"
    )


def number(name: str) -> Decode:
    """The function that decodes numbers of a dtype."""
    dtype = np.dtype(name).newbyteorder("<")
    return lambda data: np.frombuffer(data, dtype).item()


def _arrays(dtype: str, shape: tuple[int, ...] | None) -> Decode:
    def decode(data: bytes) -> np.ndarray:
        kind, dims, place = dtype, shape, 0
        if not kind:
            kind, place = _DTYPE_OF_NUMBER[data[0]], 1
        if dims is None:
            count, width = divmod(data[place], 4)
            end = place + 1 + count * 2**width
            dims = tuple(np.frombuffer(data[place + 1 : end], f"<u{2**width}").tolist())
            place = end
        return np.frombuffer(data[place:], np.dtype(kind).newbyteorder("<")).reshape(dims)

    return decode


def image(data: bytes) -> np.ndarray:
    """Decode a raw image: width, height, size of the mode's name, this name, pixels."""
    from PIL import Image

    width, height, size = np.frombuffer(data[:12], "<u4").tolist()
    mode = data[12 : 12 + size].decode()
    return np.asarray(Image.frombytes(mode, (width, height), data[12 + size :]))


def pieces(data: bytes, first: int) -> list[bytes]:
    """Decode pieces of bytes; their number, at `first`, and their sizes come before them."""
    count = int.from_bytes(data[first : first + 4], "little")
    place = first + 4 + 4 * count
    found = []
    for size in np.frombuffer(data[first + 4 : place], "<u4", count).tolist():
        found.append(data[place : place + size])
        place += size
    if place != len(data):
        raise ValueError(f"its pieces have {place} bytes, and it has {len(data)}")
    return found


_DECODERS: dict[str, Decode] = {
    **dict.fromkeys(("bytes", "jpeg", "png"), bytes),
    "str": lambda data: str(data, "utf-8"),
    "int": number("int64"),
    **{name: number(name) for name in _NUMBERS},
    "str_int": lambda data: int(str(data, "utf-8")),
    "str_float": lambda data: float(str(data, "utf-8")),
    "str_decimal": lambda data: Decimal(str(data, "utf-8")),
    "json": parsed_json,
    "pil": image,
    # Two names of one encoding.
    **dict.fromkeys(("jpeg_array", "jpegarray"), lambda data: pieces(data, 0)),
    # The first number of a list is kept for later versions.
    **dict.fromkeys(("list[jpeg]", "list[png]"), lambda data: pieces(data, 4)),
    "list[pil]": lambda data: list(map(image, pieces(data, 4))),
}


class _MDSShard(SampleShard):
    _decoder_of = staticmethod(decoder_of)


class MDSSource(DescribedSource):
    """The samples of MDS shards: dicts with a value for each column.

    Numbers, texts and JSON become Python objects. Arrays and raw images (`pil`) become numpy arrays. Encoded images
    stay bytes. Shards that are compressed by zstd are decompressed into the cache of this node (`storage.LocalFile`),
    and compared with the digests in the index. Other shards have no checksums.

    Args:
        paths: folders with an `index.json`, or shards in such a folder; see `storage.listed`.
        columns: names of the columns to read; by default all.
        described: path -> description of a shard, if the index has been read; only for a single open shard.

    Raises:
        ConfigError: There is no such file or column, or no index of the shards.
        FormatError: A file is cut short or damaged, compressed in another way, or has a column of pickled objects.
        SchemaError: The columns that are read differ between the shards.
    """

    _format = "mds"
    _shard_class = _MDSShard
