"""Decompressing the chunks of Riegeli files."""

from __future__ import annotations

from functools import cache
from typing import Any, Callable

from libai_data.errors import ConfigError

Expand = Callable[[bytes, int], bytes]
_UNCOMPRESSED, _ZSTD = 0, ord("z")
_OTHERS = {_ZSTD: "zstd", ord("b"): "brotli", ord("s"): "snappy"}


class BrokenChunk(ValueError):
    """Bytes are no chunk of records; the message says why.

    Args:
        message: for people.
        place: of several chunks that were read, which one it is.
    """

    def __init__(self, message: str, place: int = 0) -> None:
        super().__init__(message)
        self.place = place


def expander(kind: int) -> Expand | None:
    """What decompresses, given the bytes and how many they become; None if they are not compressed.

    Args:
        kind: of the compression, as a chunk's first byte tells it.

    Raises:
        BrokenChunk: There is no such compression.
        ConfigError: The package that decompresses it is not installed.
    """
    if kind == _UNCOMPRESSED:
        return None
    if kind not in _OTHERS:
        raise BrokenChunk(f"it names a compression {kind}, which does not exist")
    return (_zstandard() if kind == _ZSTD else None) or _pyarrow(_OTHERS[kind])


@cache
def _zstandard() -> Expand | None:
    """By the package zstandard: a microsecond a record, where pyarrow takes nine. None if it is not installed."""
    try:
        import zstandard
    except ModuleNotFoundError:
        return None
    decompress, announced = zstandard.ZstdDecompressor().decompress, zstandard.frame_content_size

    def expand(data: bytes, size: int) -> bytes:
        try:
            # Before memory is taken for what broken bytes announce; -1 is an unknown size.
            if announced(data) not in (size, -1):
                raise BrokenChunk(f"its zstd frame announces {announced(data)} bytes, where {size} are expected")
            return decompress(data, max_output_size=size)
        except zstandard.ZstdError as error:
            raise BrokenChunk(str(error)) from error

    return expand


@cache
def _pyarrow(name: str) -> Expand:
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        raise ConfigError(f"records compressed by {name} need pyarrow: pip install 'libai_data[records]'") from error
    codec: Any = pyarrow.Codec(name)

    def expand(data: bytes, size: int) -> bytes:
        try:
            return bytes(codec.decompress(data, size, asbytes=True))
        except (OSError, ValueError) as error:
            raise BrokenChunk(str(error)) from error

    return expand
