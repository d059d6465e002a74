"""The identity of data: what tells a file, or all files of a source, from any other and from itself after a change.

A file is known by its real path, its size and its time of change; a file of a store by its address and the version that
the store names. Whatever is kept for later or shared, such as an index, a converted shard or records in memory, has
the identity of its data in its name. A checkpoint keeps a fingerprint instead (`datasets/fingerprint.py`), since data
may move between two runs.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any, NamedTuple

from libai_data.atomic_files import PathLike

_TICK = 20_000_000  # ns; file systems take the time from a clock that runs in steps of up to 10 ms


def file_identity(path: PathLike) -> list[Any]:
    """[real path, size in bytes, time of change in ns] of a file of this machine.

    Raises:
        OSError: It is not there.
    """
    settled(os.stat(path).st_mtime_ns)
    status = FileStatus.of(path)
    return [os.path.realpath(path), status.size, status.mtime_ns]


class FileStatus(NamedTuple):
    """What tells an open file from another one that has its path later."""

    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, file: PathLike | int) -> FileStatus:
        """The status of a path, or of a descriptor."""
        found = os.stat(file)
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)

    def is_same(self, other: FileStatus) -> bool:
        """Whether the size and the time of change are equal; some network file systems number files anew."""
        return self[1:] == other[1:]


def settled(mtime_ns: int) -> int:
    """The time of a change, returned when a later change is sure to get another time: after a tick of the system."""
    age = time.time_ns() - mtime_ns
    if 0 <= age < _TICK:
        time.sleep((_TICK - age) / 1e9)
    return mtime_ns


def key_of(*parts: Any) -> str:
    """A name for what depends on some values: 24 hexadecimal digits.

    Args:
        *parts: lists, strings and numbers, whose `repr` says all.
    """
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()
