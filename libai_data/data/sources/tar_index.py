"""An index of a tar archive, with which any of its files can be read without unpacking the archive."""

from __future__ import annotations

import os
import tarfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from libai_data.data.sources.packed_names import PackedNames
from libai_data.errors import FormatError

_BROKEN = (tarfile.TarError, ValueError, OverflowError, MemoryError, RecursionError, KeyError, IndexError)
_AT_ONCE = 1 << 20
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}


@dataclass(frozen=True)
class TarIndex:
    """The regular files of an archive, in its order."""

    names: PackedNames  # without a leading "./"
    offsets: np.ndarray  # int64 [n], of the first byte of each file
    sizes: np.ndarray  # int64 [n], bytes

    def __len__(self) -> int:
        return len(self.offsets)

    def numbers(self) -> list[np.ndarray]:
        """The index as four int64 vectors, as `cached_arrays` stores them."""
        return [self.offsets, self.sizes, *self.names.numbers()]

    @classmethod
    def from_numbers(cls, numbers: Sequence[np.ndarray]) -> TarIndex:
        """The inverse of `numbers`."""
        offsets, sizes, ends, data = numbers
        return cls(PackedNames.from_numbers(ends, data), offsets, sizes)


def index_tar(path: str | Path, start: int = 0, stop: int | None = None, called: str = "") -> TarIndex:
    """Find the files of an archive, which begins at the offset `start` of a file, and ends at `stop` or with the file;
    reads its headers only. `called` is the name of the file in messages, by default its path.

    Raises:
        FormatError: The archive is truncated, compressed, no tar, has a hard link or a name that leads out of it, or
            more data follows its end.
        OSError: The file does not exist, or may not be read.
    """
    offsets, sizes, named = array("q"), array("q"), called or path

    def names() -> Iterator[str]:
        with open(path, "rb") as file:
            end = os.fstat(file.fileno()).st_size if stop is None else stop
            for info in _members(named, file, start, end):
                if info.issparse():
                    raise _broken(named, info.offset, "a sparse file; write the archive without --sparse")
                if info.islnk():
                    why = f"{info.name!r} is a hard link to {info.linkname!r}, without content of its own"
                    raise _broken(named, info.offset, f"{why}; write the archive with --hard-dereference")
                if info.isreg():
                    offsets.append(info.offset_data)
                    sizes.append(info.size)
                    yield _checked_name(named, info)

    packed = PackedNames.of(names())
    return TarIndex(packed, np.array(offsets, np.int64), np.array(sizes, np.int64))


def _members(path: str | Path, file: IO[bytes], start: int, stop: int) -> Iterator[tarfile.TarInfo]:
    """The members of an archive; a FormatError if a header or content ends after `stop`."""
    head, place = _block(file, start, stop), start
    if head == bytes(tarfile.BLOCKSIZE):  # the archive is empty, and `tarfile.open` would raise
        _check_end(path, file, start, stop)
        return
    try:
        file.seek(start)
        # ImageNet has a million members. tarfile would keep all of them, and has no public way to drop them.
        archive: Any = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115
        while (info := archive.next()) is not None:
            archive.members = []
            # The size of a sparse file counts holes, which the archive does not have.
            if not info.issparse() and (info.offset_data + info.size > stop or info.size < 0):
                raise _cut(path, place, f"{info.size} bytes should follow, up to {info.offset_data + info.size}")
            place = archive.offset
            yield info
    except _BROKEN as error:
        if isinstance(error, FormatError):
            raise
        kind = next((name for magic, name in _COMPRESSED.items() if head.startswith(magic)), None)
        if place == start and kind is not None:
            raise _broken(path, place, f"it is compressed by {kind}; decompress it") from error
        if "checksum" in str(error) or "invalid header" in str(error):
            raise _broken(path, place, f"no header of a tar archive: {error}") from error
        raise _cut(path, place, str(error)) from error
    # tarfile accepts any block that is no header as the end of the archive.
    end = _block(file, archive.offset, stop)
    if len(end) < tarfile.BLOCKSIZE:
        raise _cut(path, archive.offset, "it has no end mark")
    if any(end):
        raise _broken(path, archive.offset, "no header of a tar archive")
    _check_end(path, file, archive.offset, stop)


def _check_end(path: str | Path, file: IO[bytes], place: int, stop: int) -> None:
    """Raise a FormatError if anything but zeros follows the end of the archive; tarfile would leave it out."""
    file.seek(place)
    while place < stop and (block := file.read(min(_AT_ONCE, stop - place))):
        if block.strip(b"\0"):
            raise _broken(
                path,
                place + len(block) - len(block.lstrip(b"\0")),
                "more data follows the end of the archive, such as a second archive; join archives with "
                "`tar --concatenate`, not with `cat`",
            )
        place += len(block)


def _block(file: IO[bytes], place: int, stop: int) -> bytes:
    file.seek(place)
    return file.read(max(min(tarfile.BLOCKSIZE, stop - place), 0))


def _checked_name(path: str | Path, info: tarfile.TarInfo) -> str:
    name = info.name
    while name.startswith("./"):
        name = name[2:].lstrip("/")
    if not name or name.startswith("/") or ".." in name.split("/") or "\0" in name:
        raise _broken(path, info.offset, f"a file called {info.name!r}, a name that leads out of the archive")
    return name


def _cut(path: str | Path, place: int, why: str) -> FormatError:
    return _broken(path, place, f"the archive is cut short, or damaged: {why}")


def _broken(path: str | Path, place: int, what: str) -> FormatError:
    return FormatError(f"{path} at offset {place}: {what}")
