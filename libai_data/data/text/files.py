"""The files that hold a corpus: which ones a user named, what they hold, and how to open them."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from libai_data.errors import ConfigError
from libai_data.data.sources.remote import is_remote
from libai_data.data.sources.storage import listed

JSON_LINES, TEXT, PARQUET = "jsonl", "text", "parquet"
FORMATS = (JSON_LINES, TEXT, PARQUET)
_FORMAT_OF_SUFFIX = {".jsonl": JSON_LINES, ".json": JSON_LINES, ".ndjson": JSON_LINES, ".parquet": PARQUET}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_READ_AT_ONCE = 1 << 18


class Broken(Exception):
    """A file ends too early, or is not what its suffix says; the message tells which and how."""


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """The files that patterns name, each once, in the patterns' order and then sorted by path.

    Args:
        patterns: files, globs ("**" for any depth), or folders, of which all files count but hidden ones.

    Raises:
        ConfigError: A pattern names no file, or one in a store.
    """
    for pattern in patterns:
        if is_remote(pattern):
            raise ConfigError(f"{pattern} is in a store; copy the files to a disk of this machine, and name them there")
    return list(map(Path, listed(patterns)))


def compression_of(path: Path) -> str:
    """The suffix of a path that tells its compression, or ""."""
    return path.suffix if path.suffix in COMPRESSED else ""


def format_of(path: Path) -> str:
    """What a file holds, by its suffix before that of its compression: JSON lines, Parquet, or else plain text."""
    inner = path.with_suffix("") if compression_of(path) else path
    return _FORMAT_OF_SUFFIX.get(inner.suffix, TEXT)


def open_decompressed(path: Path, raw: IO[bytes]) -> IO[bytes]:
    """The content of an opened file, decompressed as its suffix says.

    Args:
        path: of the file.
        raw: the file itself; its `tell` shows how much of it has been read.

    Raises:
        ConfigError: It is compressed by zstd, and the package zstandard is not there.
    """
    kind = compression_of(path)
    if kind == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if kind == ".bz2":
        return bz2.BZ2File(raw)
    if kind == ".xz":
        return lzma.LZMAFile(raw)
    if kind == ".zst":
        return cast(IO[bytes], _ZstandardFile(raw, _zstandard(path)))
    return raw


def read_block(path: Path, stream: Any, count: int) -> tuple[bytes, str]:
    """At least `count` bytes, or fewer at the end of the stream.

    Args:
        path: of the file.
        stream: its content, as `open_decompressed` gives it for a compressed file.
        count: bytes.

    Returns:
        The bytes, and why no more can be read, or "".
    """
    chunks: list[bytes] = []
    size = 0
    while size < count:
        try:
            chunk = stream.read1(_READ_AT_ONCE)
        except _damages(path) as error:
            return b"".join(chunks), f"the file cannot be decompressed further: {error}"
        if not chunk:
            break
        chunks.append(chunk)
        size += len(chunk)
    return b"".join(chunks), ""


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """The `pyarrow.parquet.ParquetFile` of a path.

    Raises:
        ConfigError: pyarrow is not installed.
        Broken: The file is no Parquet file, or a damaged one.
    """
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as error:
        raise ConfigError(f"{path} needs the package pyarrow: pip install 'libai_data[text]'") from error
    try:
        with ParquetFile(str(path)) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise Broken(f"{path} cannot be read as Parquet: {error}") from error


class _ZstandardFile:
    """Content of a file of zstd frames; the package's own readers take a frame that is cut off for a whole one."""

    def __init__(self, raw: IO[bytes], zstandard: Any) -> None:
        self._raw, self._new_frame = raw, zstandard.ZstdDecompressor().decompressobj
        self._frame: Any = None

    def read1(self, count: int) -> bytes:
        """Some bytes; none at the end.

        Raises:
            EOFError: A frame is cut off.
        """
        while True:
            data = self._raw.read(count)
            if not data:
                if self._frame is not None:
                    raise EOFError("a zstd frame is cut off")
                return b""
            found = self._decompress(data)
            if found:
                return found

    def _decompress(self, data: bytes) -> bytes:
        found = []
        while data:
            self._frame = self._frame or self._new_frame()
            found.append(self._frame.decompress(data))
            data = b""
            if self._frame.eof:
                data, self._frame = self._frame.unused_data, None
        return b"".join(found)


def _damages(path: Path) -> tuple[type[BaseException], ...]:
    """What the decompressors raise for a damaged file; an error of the system, such as a disk's, is not among it."""
    always: tuple[type[BaseException], ...] = (EOFError, zlib.error, lzma.LZMAError)
    if compression_of(path) == ".gz":
        return (*always, gzip.BadGzipFile)
    if compression_of(path) == ".bz2":
        return (*always, OSError, ValueError)
    if compression_of(path) == ".zst":
        return (*always, _zstandard(path).ZstdError)
    return always


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise ConfigError(f"{path} needs the package zstandard: pip install zstandard") from error
    return zstandard
