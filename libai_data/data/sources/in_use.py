"""Which copies of a cache are in use: locks of single bytes of one file, which need one descriptor for any number.

The locks belong to an open file description (fcntl(2), "Open file description locks"): a forked process has them too,
and the system releases them when the last process that has the description ends.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections import Counter
from pathlib import Path
from typing import Callable

from libai_data.errors import ConfigError

_FLOCK = struct.Struct("hhqqi0q")
_DIGITS = 15  # Of a key, which tell its byte: the offset of a lock has 63 bits.
_guard = threading.RLock()
_current: dict[Path, _Uses] = {}


class _Uses:
    """The copies that this process uses by one description."""

    def __init__(self, folder: Path) -> None:
        self.descriptor = _opened(folder)
        self._counts: Counter[str] = Counter()
        self.is_shared = False
        """Whether a forked process has the description too, so that a byte must stay locked."""

    def add(self, key: str) -> None:
        if not self._counts[key] and not _lock(self.descriptor, key, fcntl.F_RDLCK):
            raise BlockingIOError(f"the copy {key} is being removed")
        self._counts[key] += 1

    def remove(self, folder: Path, key: str) -> None:
        with _guard:
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
                if not self.is_shared:
                    _lock(self.descriptor, key, fcntl.F_UNLCK)
            if not self._counts:
                if _current.get(folder) is self:
                    del _current[folder]
                os.close(self.descriptor)


def use(folder: Path, key: str) -> Callable[[], None]:
    """Note that a copy is in use.

    Args:
        folder: of the cache.
        key: of the copy, hexadecimal digits.

    Returns:
        What ends the use, in this process.

    Raises:
        OSError: The folder cannot be written to, or the copy is just being removed.
    """
    with _guard:
        uses = _current.get(folder)
        if uses is None:
            uses = _current[folder] = _Uses(folder)
        uses.add(key)
    return lambda: uses.remove(folder, key)


def is_used(folder: Path, key: str) -> bool:
    """Whether any process uses a copy."""
    descriptor = _opened(folder)
    try:
        return not _lock(descriptor, key, fcntl.F_WRLCK)
    finally:
        os.close(descriptor)


def _opened(folder: Path) -> int:
    return os.open(folder / "in_use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _lock(descriptor: int, key: str, kind: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, int(key[:_DIGITS], 16), 1, 0))
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            f"the file system of the cache has no locks ({error}); set LIBAI_DATA_CACHE_DIR to a folder on a local disk"
        ) from error
    return True


def _before_fork() -> None:
    _guard.acquire()
    for uses in _current.values():
        uses.is_shared = True
    _current.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_guard.release, after_in_child=_guard.release)
