"""The files of a corpus: which files a user named, their formats, and how to open them."""

from __future__ import annotations

import bz2
import codecs
import gzip
import logging
import lzma
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Callable, cast

from libai_data.data.files.file_map import FileMap
from libai_data.data.shard_work.work_folder import LOCK
from libai_data.data.sources.file_formats import problem_of_pointer
from libai_data.data.sources.parquet import JOINED, is_joined
from libai_data.data.sources.remote import is_remote
from libai_data.data.sources.storage import listed, patterns_of
from libai_data.errors import ConfigError, installed

logger = logging.getLogger(__name__)

JSON_LINES, TEXT, PARQUET = "jsonl", "text", "parquet"
FORMATS = (JSON_LINES, TEXT, PARQUET)
_FORMAT_OF_SUFFIX = {".jsonl": JSON_LINES, ".json": JSON_LINES, ".ndjson": JSON_LINES, ".parquet": PARQUET}
_TEXT_SUFFIXES = (".txt", ".text")
# Suffixes of tables and archives, whose lines are no documents.
_NO_TEXT_SUFFIXES = (".csv", ".tsv", ".arrow", ".feather", ".orc", ".avro", ".xlsx", ".zip", ".tar", ".tgz", ".pdf")
_MAGIC = {b"\x1f\x8b": ".gz", b"BZh91AY&SY": ".bz2", b"\xfd7zXZ": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}
_OWN_SUFFIXES = (".bin", ".idx", ".bad_lines", ".unfinished")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_READ_AT_ONCE = 1 << 18


class Broken(Exception):
    """A file ends too early, or has another format than its suffix says; the message names the file and the reason."""


def find_inputs(patterns: Sequence[str], form: str = "", but: Sequence[Path] = ()) -> list[Path]:
    """The files that patterns name, each once, in the patterns' order and then sorted by path.

    Folders and globs never name what preprocessing and its datasets write: `.bin`, `.idx`, lists of bad lines, shards
    and indices.

    Args:
        patterns: files, globs ("**" for any depth), or folders. In a folder, all files with a known suffix count except
            hidden ones.
        form: format of all files, or "". With a format, the files of folders count whatever their suffix is.
        but: files that are no input, such as the tokenizer's, unless they are named one by one.

    Raises:
        ConfigError: A pattern names no file or a store, a suffix is not of text, or a file would count twice.
    """
    found: dict[str, None] = {}
    no_input = {os.path.realpath(path) for path in but}
    for pattern in patterns_of(patterns):
        if is_remote(pattern):
            raise ConfigError(f"{pattern} is in a store; copy the files to a disk of this machine, and name them there")
        paths = listed(pattern)
        if not os.path.isfile(pattern):
            paths = [path for path in paths if not (_is_own(Path(path)) or os.path.realpath(path) in no_input)]
        if os.path.isdir(pattern) and not form:
            paths = _with_known_suffix(pattern, paths)
        if not paths:
            raise ConfigError(f"no file with documents is named by {pattern!r}")
        found.update(dict.fromkeys(paths))
    if not found:
        raise ConfigError("no files are given; give files, globs (in quotes) or folders")
    for name in () if form else found:
        if _without_compression(Path(name)).suffix.lower() in _NO_TEXT_SUFFIXES:
            raise ConfigError(
                f"the suffix of {name} is not that of a text file; convert the file to JSON lines, or set --format to "
                "read its lines"
            )
    _refuse_duplicates(found)
    return list(map(Path, found))


def _with_known_suffix(folder: str, paths: Sequence[str]) -> list[str]:
    known = (*_FORMAT_OF_SUFFIX, *_TEXT_SUFFIXES)
    others = [path for path in paths if _without_compression(Path(path)).suffix.lower() not in known]
    if others:
        advice = (
            f"{len(others)} of {len(paths)} files in {folder} are skipped, such as {others[0]}: suffixes of documents "
            f"are {', '.join(known)}, also compressed. To read other files, name them by a glob (in quotes), or set "
            "--format"
        )
        if len(others) == len(paths):
            raise ConfigError(advice)
        logger.warning("%s.", advice)
    left_out = set(others)
    return [path for path in paths if path not in left_out]


def _is_own(path: Path) -> bool:
    """Whether preprocessing, or a dataset over its results, has written a file."""
    in_folder = any(parent.suffix == ".parts" and (parent / LOCK).exists() for parent in path.parents)
    return in_folder or path.suffix in _OWN_SUFFIXES or path.parent.suffix == ".cache"


def _refuse_duplicates(paths: Iterable[str]) -> None:
    by_content: dict[str, str] = {}
    for path in paths:
        first = by_content.setdefault(os.path.realpath(_without_compression(Path(path))), path)
        if first != path:
            raise ConfigError(
                f"{first} and {path} have the same name except for the compression, or are one file, so that documents "
                "would count twice; remove one of them"
            )


def _without_compression(path: Path) -> Path:
    return path.with_suffix("") if compression_of(path) else path


def compression_of(path: Path) -> str:
    """The suffix of a path that shows its compression, in lower case, or ""."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSED else ""


def format_of(path: Path) -> str:
    """The format of a file, by its suffix before that of its compression: JSON lines, Parquet, or else plain text."""
    return _FORMAT_OF_SUFFIX.get(_without_compression(path).suffix.lower(), TEXT)


def open_decompressed(path: Path, raw: IO[bytes]) -> IO[bytes]:
    """The content of an opened file, decompressed as its suffix says. The `tell` of the file itself, `raw`, shows how
    much of it has been read. A ConfigError if the file is compressed by zstd, and the package zstandard is not
    installed."""
    kind = compression_of(path)
    if kind == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if kind == ".bz2":
        return cast(IO[bytes], _FramedFile(raw, bz2.BZ2Decompressor, _READ_AT_ONCE))
    if kind == ".xz":
        return cast(IO[bytes], _FramedFile(raw, lzma.LZMADecompressor, _READ_AT_ONCE))
    if kind == ".zst":
        return cast(IO[bytes], _FramedFile(raw, _zstandard(path).ZstdDecompressor().decompressobj))
    return raw


def read_block(path: Path, stream: Any, count: int) -> tuple[bytes, str]:
    """At least `count` bytes of a decompressed stream, or fewer at its end; and why no more can be read, or ""."""
    chunks: list[bytes] = []
    size = 0
    while size < count:
        try:
            chunk = stream.read1(_READ_AT_ONCE)
        except _damage_errors(path) as error:
            return b"".join(chunks), f"the file cannot be decompressed further: {error}"
        if not chunk:
            break
        chunks.append(chunk)
        size += len(chunk)
    return b"".join(chunks), ""


def foreign_encoding(data: bytes) -> str:
    """Why a file is no text in UTF-8, if it begins as UTF-16, UTF-32, a compressed file or a pointer does; else ""."""
    for magic, suffix in _MAGIC.items():
        if data.startswith(magic):
            return f"the file is compressed; rename it so that its name ends with {suffix}"
    if problem := problem_of_pointer(data):
        return problem
    # Text of any script has characters of ASCII, such as spaces and ends of lines. In UTF-16, one byte of each is 0,
    # always on the same side. In UTF-32, three of four bytes are 0. Text in UTF-8 has no byte that is 0.
    fewer, more = sorted((data[0::2].count(0), data[1::2].count(0)))
    is_marked = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if is_marked or fewer > len(data) // 8 or more > max(2, len(data) // 256, 4 * fewer):
        bits = 32 if fewer > max(1, len(data) // 8) else 16
        return f"the file is UTF-{bits}, not UTF-8; convert it, as by `iconv -f UTF-{bits} -t UTF-8`"
    return ""


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """The `pyarrow.parquet.ParquetFile` of a path; a ConfigError if pyarrow is not installed."""
    pyarrow = installed("pyarrow", str(path), "'libai_data[text]'")
    parquet = installed("pyarrow.parquet", str(path), "'libai_data[text]'")
    try:
        with parquet.ParquetFile(str(path)) as file:
            content = FileMap(path)
            if is_joined(file, content.bytes, content.status.size):
                raise Broken(f"{path}: {JOINED}")
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise Broken(f"{path} cannot be read as Parquet: {error}") from error


class _FramedFile:
    """Content of a file of compressed frames. Unlike the readers of bz2, lzma and zstandard, it notices a last frame
    that is cut off, and bytes that follow a frame and are no frame. Zeros may follow a frame, as in xz.

    Args:
        raw: the file.
        new_frame: returns a decompressor for one frame.
        limit: most bytes to decompress at once, if the decompressor has such an argument.
    """

    def __init__(self, raw: IO[bytes], new_frame: Callable[[], Any], *limit: int) -> None:
        self._raw, self._new_frame, self._limit = raw, new_frame, limit
        self._frame: Any = None
        self._rest = b""

    def read1(self, count: int) -> bytes:
        """Some bytes; none at the end."""
        while True:
            data, self._rest = self._rest, b""
            if not data and getattr(self._frame, "needs_input", True):
                data = self._raw.read(count)
                if not data:
                    if self._frame is not None:
                        raise EOFError("the last frame is cut off")
                    return b""
            if self._frame is None:
                data = data.lstrip(b"\0")
                if not data:
                    continue
                self._frame = self._new_frame()
            found: bytes = self._frame.decompress(data, *self._limit)
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
            if found:
                return found


def _damage_errors(path: Path) -> tuple[type[BaseException], ...]:
    """The errors of a decompressor for a damaged file, not those of the system; but bz2 raises OSError for both."""
    own: dict[str, Any] = {".gz": [gzip.BadGzipFile], ".bz2": [OSError, ValueError]}
    of_zstandard = [_zstandard(path).ZstdError] if compression_of(path) == ".zst" else []
    return (EOFError, zlib.error, lzma.LZMAError, *own.get(compression_of(path), of_zstandard))


def _zstandard(path: Path) -> Any:
    return installed("zstandard", str(path), "zstandard")
