"""Where the files of a tar archive lie, so that any of them is read without unpacking it.

The format: POSIX.1-2017, pax, "pax Interchange Format" and "ustar Interchange Format"; GNU tar 1.35 manual, "Basic Tar
Format", for long names and numbers in base 256.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from libai_data.errors import FormatError
from libai_data.sources.packed_names import PackedNames

_BLOCK = 512
_FILES = (b"0", b"\0", b"7")
_LONG_NAME, _LONG_LINK, _PAX, _PAX_OF_ALL, _SPARSE = b"L", b"K", b"x", b"g", b"S"
# Of headers that hold a name or attributes; more is no archive that anybody wrote.
_LARGEST_EXTRA = 1 << 20
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}


@dataclass(frozen=True)
class TarIndex:
    """The regular files of an archive, in its order.

    Attributes:
        names: of the files, without a leading "./".
        offsets: int64 [n], of the first byte of each.
        sizes: int64 [n], in bytes.
    """

    names: PackedNames
    offsets: np.ndarray
    sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets)

    def numbers(self) -> list[np.ndarray]:
        """Four vectors of int64, such as `cached_arrays` keeps."""
        return [self.offsets, self.sizes, *self.names.numbers()]

    @classmethod
    def from_numbers(cls, numbers: Sequence[np.ndarray]) -> TarIndex:
        """The index of which `numbers` made the vectors."""
        offsets, sizes, ends, data = numbers
        return cls(PackedNames.from_numbers(ends, data), offsets, sizes)


def index_tar(path: str | Path, start: int = 0, stop: int | None = None) -> TarIndex:
    """Find the files of an archive; reads its headers only.

    Args:
        path: of the file.
        start: byte at which the archive begins, if it lies within a file.
        stop: byte at which it ends; by default that of the file.

    Raises:
        FormatError: It is truncated, compressed, no tar, or has a name that leads out of it; the offset is named.
        OSError: The file is not there, or may not be read.
    """
    offsets, sizes = array("q"), array("q")

    def names() -> Iterator[str]:
        with open(path, "rb") as file:
            end = os.fstat(file.fileno()).st_size if stop is None else stop
            for member in _Members(str(path), file.fileno(), start, end):
                offsets.append(member.offset)
                sizes.append(member.size)
                yield member.name

    packed = PackedNames.of(names())
    return TarIndex(packed, np.array(offsets, np.int64), np.array(sizes, np.int64))


class _Member(NamedTuple):
    name: str
    offset: int
    size: int


class _Members:
    """The regular files of an archive, header by header."""

    def __init__(self, path: str, descriptor: int, start: int, stop: int) -> None:
        self._path, self._descriptor, self._start, self._stop = path, descriptor, start, stop

    def __iter__(self) -> Iterator[_Member]:
        place = self._start
        name, attributes = "", dict[str, str]()
        while True:
            header = self._header(place)
            if header is None:
                return
            kind = header[156:157]
            size = self._number(attributes.get("size"), header[124:136], place)
            content = place + _BLOCK
            after = content + -(-size // _BLOCK) * _BLOCK
            if content + size > self._stop:
                raise self._broken(
                    place, f"the archive is cut short: {size} bytes should follow, up to {content + size}"
                )
            if kind == _LONG_NAME:
                name = _text(self._extra(place, size))
            elif kind == _PAX:
                attributes = self._attributes(place, self._extra(place, size))
            elif kind not in (_LONG_LINK, _PAX_OF_ALL):
                if kind == _SPARSE or any(key.startswith("GNU.sparse") for key in attributes):
                    raise self._broken(place, "a sparse file, which is not read; write the archive without --sparse")
                if kind in _FILES:
                    found = attributes.get("path") or name or _ustar_name(header)
                    # Old archives mark a folder by its name alone.
                    if not found.endswith("/"):
                        yield _Member(self._checked(place, found), content, size)
                    elif size > 0:
                        raise self._broken(place, f"{size} bytes called {found!r}, which names a folder")
                name, attributes = "", {}
            place = after

    def _header(self, place: int) -> bytes | None:
        """The next block; None at the end of the archive."""
        header = self._read(place, _BLOCK)
        kind = next((told for magic, told in _COMPRESSED.items() if header.startswith(magic)), None)
        if place == self._start and kind is not None and not _has_sum(header):
            raise self._broken(place, f"it is compressed by {kind}, so that no file can be found in it; decompress it")
        if len(header) < _BLOCK:
            raise self._broken(place, "the archive is cut short: it has no end mark")
        if header.count(0) == _BLOCK:
            return None
        if not _has_sum(header):
            raise self._broken(place, "no header of a tar archive: its check sum is wrong")
        return header

    def _read(self, place: int, size: int) -> bytes:
        return os.pread(self._descriptor, min(size, max(self._stop - place, 0)), place)

    def _extra(self, place: int, size: int) -> bytes:
        if size > _LARGEST_EXTRA:
            raise self._broken(place, f"a name or attributes of {size} bytes; at most {_LARGEST_EXTRA} are read")
        return self._read(place + _BLOCK, size)

    def _attributes(self, place: int, data: bytes) -> dict[str, str]:
        """Of records "<length> <key>=<value>\\n"."""
        found: dict[str, str] = {}
        while data.strip(b"\0"):
            digits = data.partition(b" ")[0]
            length = int(digits) if digits.isdigit() else 0
            key, equals, value = data[len(digits) + 1 : length - 1].partition(b"=")
            if not len(digits) < length <= len(data) or not equals or data[length - 1 : length] != b"\n":
                raise self._broken(place, "its extended attributes are malformed")
            found[_text(key)] = _text(value)
            data = data[length:]
        return found

    def _number(self, attribute: str | None, field: bytes, place: int) -> int:
        if attribute is not None and attribute.isdigit():
            return int(attribute)
        if field[0] == 0x80:
            return int.from_bytes(field[1:], "big")
        try:
            size = int(field.strip(b" \0") or b"0", 8)
        except ValueError:
            size = -1
        if size < 0:
            raise self._broken(place, f"a size of {field!r}, which is no number")
        return size

    def _checked(self, place: int, name: str) -> str:
        while name.startswith("./"):
            name = name[2:].lstrip("/")
        parts = name.split("/")
        if not name or name.startswith("/") or ".." in parts or "\0" in name:
            raise self._broken(place, f"a file called {name!r}, a name that leads out of the archive; such are refused")
        return name

    def _broken(self, place: int, what: str) -> FormatError:
        return FormatError(f"{self._path} at offset {place}: {what}")


def _has_sum(header: bytes) -> bool:
    field = header[148:156]
    try:
        # The sum counts its own field as blanks.
        return int(field.strip(b" \0"), 8) == sum(header) - sum(field) + len(field) * ord(" ")
    except ValueError:
        return False


def _ustar_name(header: bytes) -> str:
    name, prefix = _text(header[:100]), _text(header[345:500])
    # GNU's older format keeps other things where the prefix is.
    return f"{prefix}/{name}" if prefix and header[257:263] == b"ustar\0" else name


def _text(field: bytes) -> str:
    return os.fsdecode(field.split(b"\0", 1)[0])
