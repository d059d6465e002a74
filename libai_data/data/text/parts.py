"""Parts: a corpus cut into pieces of work that depend on the files alone, never on the processes that do the work."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from libai_data.data.text.files import (
    FORMATS,
    PARQUET,
    Broken,
    compression_of,
    foreign_encoding,
    format_of,
    open_decompressed,
    open_parquet,
    read_block,
)
from libai_data.errors import ConfigError

# Enough of them to keep many processes busy to the end, and few enough for one folder.
_PARTS, _LEAST, _MOST = 256, 1 << 20, 64 << 20
_HEAD_BYTES = 4096
# CR alone ends a line, too. A CR that may be the first half of a CRLF is no place for a cut.
_END_OF_LINE = re.compile(rb"\n|\r(?=[^\n])")


@dataclass(frozen=True)
class Piece:
    """Consecutive records of a file."""

    path: str
    format: str
    start: int  # the first byte of an uncompressed file, or the first row group of Parquet
    stop: int  # behind the last byte or row group
    data: bytes | None = None  # the decompressed bytes of a compressed file
    cost: int = 0  # size on disk in bytes
    problem: str = ""  # why the file could not be read beyond this piece, or ""

    def read(self) -> bytes:
        """The bytes of a piece that is not of Parquet."""
        if self.data is not None:
            return self.data
        with open(self.path, "rb") as file:
            file.seek(self.start)
            return file.read(self.stop - self.start)


@dataclass(frozen=True)
class Part:
    """Pieces that are tokenized together, into one shard."""

    number: int  # from 0, in the corpus's order
    pieces: tuple[Piece, ...]  # at least one

    @property
    def cost(self) -> int:
        """Bytes on disk."""
        return sum(piece.cost for piece in self.pieces)


@dataclass(frozen=True)
class Cutting:
    """How files are cut."""

    format: str = ""  # of all files; by default, each file's suffix decides
    part_bytes: int = 0  # about the bytes of text in a part; 0 for a 256th of all files, but 1 to 64 MiB

    def __post_init__(self) -> None:
        if self.format not in ("", *FORMATS):
            raise ConfigError(f"format={self.format!r}: the format of files is one of {list(FORMATS)}")

    def for_files(self, paths: Sequence[Path]) -> Cutting:
        """A copy with `part_bytes` set for these files."""
        total = sum(os.path.getsize(path) for path in paths)
        return replace(self, part_bytes=self.part_bytes or min(max(total // _PARTS, _LEAST), _MOST))

    def format_of(self, path: Path) -> str:
        """The format of a file."""
        return self.format or format_of(path)


def cut_into_parts(paths: Sequence[Path], cutting: Cutting) -> Iterator[Part]:
    """Cut files into parts; small files share one."""
    pieces: list[Piece] = []
    number, size = 0, 0
    cutting = cutting.for_files(paths)
    for path in paths:
        for piece in _pieces(path, cutting):
            pieces.append(piece)
            size += piece.cost if piece.data is None else len(piece.data)
            if size >= cutting.part_bytes:
                yield Part(number, tuple(pieces))
                number, pieces, size = number + 1, [], 0
    if pieces:
        yield Part(number, tuple(pieces))


def _pieces(path: Path, cutting: Cutting) -> Iterator[Piece]:
    form = cutting.format_of(path)
    if form == PARQUET:
        if compression_of(path):
            raise ConfigError(f"{path} is a compressed Parquet file; Parquet compresses by itself: decompress it first")
        yield from _row_groups(path, cutting)
    elif compression_of(path):
        yield from _blocks(path, form, cutting)
    else:
        yield from _ranges(path, form, cutting)


def _row_groups(path: Path, cutting: Cutting) -> Iterator[Piece]:
    try:
        with open_parquet(path) as file:
            rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    except Broken as broken:
        yield Piece(str(path), PARQUET, 0, 0, cost=os.path.getsize(path), problem=str(broken))
        return
    bytes_of_row = os.path.getsize(path) / max(1, sum(rows))
    start = 0
    for group in range(len(rows)):
        cost = int(bytes_of_row * sum(rows[start : group + 1]))
        if cost >= cutting.part_bytes or group == len(rows) - 1:
            yield Piece(str(path), PARQUET, start, group + 1, cost=cost)
            start = group + 1


def _ranges(path: Path, form: str, cutting: Cutting) -> Iterator[Piece]:
    """Ranges of an uncompressed file, found without reading what lies between their ends."""
    length, start = os.path.getsize(path), 0
    with open(path, "rb") as file:
        problem = foreign_encoding(file.read(_HEAD_BYTES))
        if problem:
            yield Piece(str(path), form, 0, 0, cost=length, problem=problem)
            return
        while start < length:
            stop = _next_cut(file, start + cutting.part_bytes, length)
            yield Piece(str(path), form, start, stop, cost=stop - start)
            start = stop


def _next_cut(file: IO[bytes], place: int, length: int) -> int:
    """The first place behind an end of a line that is at or after `place`."""
    # Start one byte earlier, so that an end of a line at `place` is found.
    start = max(0, place - 1)
    found, read = b"", 1 << 16
    while start + len(found) < length:
        file.seek(start + len(found))
        more = file.read(max(read, len(found)))
        if not more:  # The file was cut short meanwhile.
            break
        found += more
        match = _END_OF_LINE.search(found)
        if match:
            return start + int(match.end())
    return length


def _blocks(path: Path, form: str, cutting: Cutting) -> Iterator[Piece]:
    """Decompressed blocks of a file, which end at ends of lines."""
    rest, bytes_read = b"", 0
    with open(path, "rb") as raw:
        stream, whole = open_decompressed(path, raw), Piece(str(path), form, 0, 0)
        if not os.path.getsize(path):
            yield replace(whole, problem="the file has no bytes, but a compressed file has some: it is cut short")
            return
        while True:
            block, problem = read_block(path, stream, cutting.part_bytes)
            if not (bytes_read or rest) and foreign_encoding(block[:_HEAD_BYTES]):
                block, problem = b"", foreign_encoding(block[:_HEAD_BYTES])
            rest += block
            # The text behind the last whole line of a damaged file is no document.
            end = len(rest) if not block and not problem else _last_cut(rest)
            if end or problem:
                yield replace(whole, data=rest[:end], cost=raw.tell() - bytes_read, problem=problem)
                bytes_read = raw.tell()
            if problem or not block:
                return
            rest = rest[end:]


def _last_cut(data: bytes) -> int:
    """The place behind the last end of a line in `data`, or 0."""
    return max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) + 1
