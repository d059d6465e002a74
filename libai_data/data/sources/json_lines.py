"""Reads objects of JSON lines files by index."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from libai_data.atomic_files import PathLike
from libai_data.data.json_text import parsed_json
from libai_data.data.sources.mapped_file import MappedFile
from libai_data.data.sources.record_index import STALE_INDEX, record_index
from libai_data.data.sources.sharded import Paths, ShardedSource, opened
from libai_data.data.sources.storage import listed, patterns_of
from libai_data.errors import ConfigError, FormatError

logger = logging.getLogger(__name__)

_KIND = "jsonl 2"
_SUFFIXES = (".jsonl", ".ndjson", ".json")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SCANNED_AT_ONCE = 1 << 24
_BLANKS = b" \t\r\n"
_ENDS = (b"", b"\n", b"\r")
_OPENING = (b"[", b"{")
_ONE_A_LINE = "; JSON lines have one object per line; `jq -c '.[]'` converts an array to JSON lines"
_NOT_UTF_8 = "; it has zero bytes, as UTF-16 does: convert the file, as by `iconv -f UTF-16 -t UTF-8`"
_NO_LINE = f"; no line begins and ends there, {STALE_INDEX}"


class JsonLinesSource(ShardedSource):
    """The objects of JSON lines files: one dict per line, parsed when it is read. Blank lines are skipped.

    Lines end with LF, CRLF or CR.

    The first process that opens a file finds where its lines begin, and stores this in an index file. If the file's
    size or modification time changes, the index is built again.

    Args:
        paths: files, globs or folders; see `storage.listed`. If a folder has JSON lines, its other files are skipped.
        cache_dir: folder for index files; see `record_index`.

    Raises:
        ConfigError: There is no such file, it is compressed, or no index can be written.
        FormatError: When a line is read that is no JSON object; the message has file, record and offset.
    """

    def __init__(self, paths: Paths, cache_dir: PathLike | None = None) -> None:
        files = opened(paths if isinstance(paths, MappedFile) else _listed(paths))
        for file in files:
            if _compression(file.source):
                raise ConfigError(f"{file.source} is compressed, so no line can be read by itself; decompress it first")
        super().__init__(files, [_Shard(file, cache_dir) for file in files])


def _listed(paths: Paths) -> list[str]:
    """The files that `paths` names. If a folder has files with a suffix of JSON lines, only these."""
    found: list[str] = []
    for pattern in patterns_of(paths):
        files = listed(pattern)
        known = [path for path in files if path.lower().removesuffix(_compression(path)).endswith(_SUFFIXES)]
        if known and len(known) < len(files) and os.path.isdir(pattern):
            others = sorted(set(files) - set(known))
            words = "%d of %d files in %s are skipped, such as %s; to read them, name them by a glob."
            logger.warning(words, len(others), len(files), pattern, others[0])
            files = known
        found += files
    return list(dict.fromkeys(found))


def _compression(path: str) -> str:
    return next((suffix for suffix in _COMPRESSED if path.lower().endswith(suffix)), "")


class _Shard:
    def __init__(self, file: MappedFile, cache_dir: PathLike | None) -> None:
        self._file = file
        self._starts, self._stops = record_index(file, _KIND, lambda: _lines(file), cache_dir)

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The objects of these rows, in this order."""
        content = self._file.bytes
        return [
            self._parsed(content[start:stop], row, start)
            for row, start, stop in zip(rows, self._starts[rows].tolist(), self._stops[rows].tolist())
        ]

    def _parsed(self, line: bytes, row: int, start: int) -> dict[str, Any]:
        try:
            return parsed_object(line)
        except FormatError as error:
            content, stop = self._file.bytes, start + len(line)
            begins = start == len(_BYTE_ORDER_MARK) or content[start - 1 : start] in _ENDS
            is_line = begins and content[stop : stop + 1] in _ENDS and b"\n" not in line
            stale = "" if is_line else _NO_LINE
            raise FormatError(f"{self._file.source}, record {row}, offset {start}: {error}{stale}") from error


def parsed_object(line: Any) -> dict[str, Any]:
    """The object in a line of JSON lines, text or bytes; a FormatError if the line is no JSON, or no object."""
    try:
        found = parsed_json(line)
    except (ValueError, RecursionError) as error:
        begins = line if isinstance(line, bytes) else line.encode()
        hint = _ONE_A_LINE if begins.strip() in _OPENING else _NOT_UTF_8 if b"\0" in begins else ""
        raise FormatError(f"not JSON: {error}{hint}") from error
    if not isinstance(found, dict):
        raise FormatError(f"a JSON {type(found).__name__}, but an object is expected{_ONE_A_LINE}")
    return found


def _lines(file: MappedFile) -> list[np.ndarray]:
    """The offsets at which the lines that are not blank begin and end, int64 [lines] each.

    Lines end with LF, CR or CRLF. Of CRLF, the line ends before CR, and an empty line follows.
    """
    newlines = []
    for first in range(0, file.size, _SCANNED_AT_ONCE):
        block = file.array[first : first + _SCANNED_AT_ONCE]
        newlines.append(np.flatnonzero((block == ord("\n")) | (block == ord("\r"))) + first)
    stops = np.concatenate([*newlines, [file.size]]).astype(np.int64)
    begin = len(_BYTE_ORDER_MARK) if file.bytes[: len(_BYTE_ORDER_MARK)] == _BYTE_ORDER_MARK else 0
    starts = np.concatenate([[begin], stops[:-1] + 1]).astype(np.int64)
    there = starts < stops
    starts, stops = starts[there], stops[there]
    # Only lines that begin with a blank can be blank.
    begins_blank = np.flatnonzero(np.isin(file.array[starts], np.frombuffer(_BLANKS, np.uint8)))
    blank = [place for place in begins_blank.tolist() if not file.bytes[starts[place] : stops[place]].strip(_BLANKS)]
    return [np.delete(starts, blank), np.delete(stops, blank)]
