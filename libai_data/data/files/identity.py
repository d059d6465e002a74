"""The identity of data, which distinguishes a file, or the files of a source, from others and from older versions.

The identity of a file is its real path, size and time of change. If LIBAI_DATA_FILE_IDENTITY is "content", it is its
size and a digest of all its bytes. For a file of a store, it is the address and the version that the store names. All
that is kept or shared, such as an index, a converted shard or records in memory, has the identity of its data in its
name. A checkpoint stores a fingerprint instead (`datasets/fingerprint.py`), because data may move between two runs; it
also stores the identity if the identity has no paths.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from libai_data.data.attributes import attribute_of, inner_datasets
from libai_data.errors import ConfigError

if TYPE_CHECKING:  # Its imports would delay the start of each worker.
    from libai_data.atomic_files import PathLike

_VARIABLE = "LIBAI_DATA_FILE_IDENTITY"
_AT_ONCE = 1 << 20
_TICK = 20_000_000  # ns; file systems take the time from a clock that runs in steps of up to 10 ms


def file_identity(path: PathLike) -> list[Any]:
    """[real path, size in bytes, time of change in ns] of a file of this machine, or ["content", size, digest]; an
    OSError if there is no such file."""
    now = os.stat(path)
    if by_content() and stat.S_ISREG(now.st_mode):
        # No user can set the time at which an inode changes, so a digest is valid as long as this time is the same.
        kept = now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, settled(now.st_ctime_ns)
        return ["content", now.st_size, _digest(os.path.realpath(path), kept)]
    settled(now.st_mtime_ns)
    status = FileStatus.of(path)
    return [os.path.realpath(path), status.size, status.mtime_ns]


def by_content() -> bool:
    """Whether LIBAI_DATA_FILE_IDENTITY asks for digests of files instead of paths and times; a ConfigError if
    unknown."""
    kind = os.environ.get(_VARIABLE, "") or "time"
    if kind not in ("time", "content"):
        raise ConfigError(f"{_VARIABLE} is {kind!r}; it must be 'time' (the default) or 'content'")
    return kind == "content"


@lru_cache(maxsize=1 << 16)
def _digest(path: str, kept: tuple[int, ...]) -> str:
    """The digest of a file that has the status `kept`; computed once in a process."""
    return digest_of_file(path, hashlib.blake2b(digest_size=16))


def digest_of_file(path: PathLike, digest: Any) -> str:
    """The digest of all bytes of a file, in hexadecimal, by an object of `hashlib`."""
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(_AT_ONCE), b""):
            digest.update(block)
    return str(digest.hexdigest())


def identity_within(data: Any) -> Any:
    """The `identity` of a source, or of the sources that a dataset is made of; [] if none has one."""
    identity = attribute_of(data, "identity", "")
    if identity and isinstance(identity, (str, list, tuple)):
        return identity
    return [identity for identity in map(identity_within, inner_datasets(data)) if identity]


class FileStatus(NamedTuple):
    """Distinguishes an open file from another file that has the same path later."""

    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, file: PathLike | int) -> FileStatus:
        """The status of a path, or of a descriptor."""
        found = os.stat(file)
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)

    def is_same(self, other: FileStatus) -> bool:
        """Whether size and time of change are equal, and inodes too if LIBAI_DATA_FILE_IDENTITY is "content", which
        trusts no times. Otherwise inodes may differ: some network file systems renumber files."""
        compared = slice(0 if by_content() else 1, None)
        return self[compared] == other[compared]


def settled(mtime_ns: int) -> int:
    """Wait until any later change is sure to get another time, at most for a tick of the system; returns `mtime_ns`."""
    age = time.time_ns() - mtime_ns
    if 0 <= age < _TICK:
        time.sleep((_TICK - age) / 1e9)
    return mtime_ns


def key_of(*parts: Any) -> str:
    """A name of 24 hexadecimal digits for what depends on lists, strings and numbers, whose `repr` is complete."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()
