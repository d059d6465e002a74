"""A folder of bounded size that keeps copies of files, shared by all processes of a node.

Locks of single bytes of one file mark the copies in use, so one descriptor is enough for any number. The locks belong
to an open file description (fcntl(2), "Open file description locks"): a forked process has them too, and the system
releases them when the last process that has the description ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from libai_data.atomic_files import written_whole
from libai_data.data.failure_notes import Failures, failures_noted, note_failure
from libai_data.errors import ConfigError, StorageError

logger = logging.getLogger(__name__)

_ENDINGS = (".part", ".room", ".lock")
_NAME = re.compile(r"(?P<key>[0-9a-f]{24})(?:\.(?:lock|part|room)|-.*)")
_INDEX = re.compile(r".*-[0-9a-f]{24}\.(?:npy|lock|unfinished)")  # see `record_index`
_FLOCK = struct.Struct("hhqqi0q")
_IN_USE = "in_use"
_DIGITS = 15  # Of a key, which tell its byte: the offset of a lock has 63 bits.
NO_ROOM = "finds no room"
"""What the error of a full cache says."""
_guard = threading.RLock()


@dataclass
class _Entry:
    """What the cache has of one file: bytes held or promised, those of its index, and when it was used last (ns)."""

    copy: int = 0
    index: int = 0
    used: int = 0

    @property
    def size(self) -> int:
        """All bytes."""
        return self.copy + self.index


@dataclass(frozen=True)
class LocalCache:
    """Copies of files. If there is no room, the least recently used copy is removed, but never a copy in use.

    Each copy has a file `<key>.lock`. A process that makes or removes the copy has an exclusive lock. A process that
    reads the copy marks it as used, see `in_use`. The system releases both when the process dies.

    Attributes:
        directory: the folder, on a disk of this node; created when needed.
        size: bytes that all copies together may have.
    """

    directory: Path
    size: int

    def hold(
        self, key: str, name: str, size: int | None, make: Callable[[Path], None]
    ) -> tuple[Path, Callable[[], None]]:
        """The copy of a file, made if it is not there yet.

        Of all processes that ask at once one makes it, and the others wait. If it fails, so do they; if it dies, the
        next one makes it. A copy appears whole or not at all.

        Args:
            key: of the file and its version: 24 hexadecimal digits.
            name: what the copy's name ends with.
            size: bytes, if they are known.
            make: writes the copy to the path that it is given.

        Returns:
            Path, and what ends the use; a process that is forked meanwhile uses the copy until it ends it too.

        Raises:
            ConfigError: The folder cannot be written to.
            StorageError: There is no room, or the process that was making the copy has failed.
        """
        copy = self.directory / f"{key}-{name}"
        first: Failures | None = None
        while True:
            lock = self._open_lock(f"{key}.lock")
            try:
                first = first or failures_noted(lock)
                if not _is_alone_with(lock):
                    logger.info("Waiting for another process, which is fetching %s.", copy.name)
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if not self._is_current(lock, f"{key}.lock"):
                    continue  # The copy and its lock were removed meanwhile.
                if not _is_whole(copy, size):
                    self._make(key, copy, size, make, lock, first)
                os.utime(lock)
                return copy, use(self.directory, key)
            finally:
                os.close(lock)

    def expect(self, key: str, when: int) -> None:
        """Note when a copy will be used again; of copies that are not in use, that with the earliest time goes first.

        Args:
            key: of the copy.
            when: ns, as of a file's time of change; the later, the longer the copy is kept.
        """
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.directory / f"{key}.lock", ns=(when, when))

    def _make(
        self, key: str, copy: Path, size: int | None, make: Callable[[Path], None], lock: int, first: Failures
    ) -> None:
        noted = failures_noted(lock)
        if noted.times > first.times:
            raise StorageError(f"the process that was fetching {copy.name} has failed: {noted.reason}")
        try:
            with written_whole(copy, self.directory / f"{key}.part") as part:
                self._make_room(key, size or 0)
                make(part)
                if size is None:
                    self._make_room(key, part.stat().st_size)
        except Exception as error:
            with contextlib.suppress(OSError):  # A full disk, which the error names.
                note_failure(lock, error)
            raise
        finally:
            (self.directory / f"{key}.room").unlink(missing_ok=True)

    def _make_room(self, key: str, size: int) -> None:
        """Remove copies until there is room, and keep it for a file that is to be made."""
        with self._alone() as lock:
            # At least the bytes of all copies, by what was promised since they were last counted. Counting looks at
            # each file, so it waits until half of the room may be taken; indices, which are not promised, fit besides.
            held = int.from_bytes(os.pread(lock, 8, 0), "little")
            entries: dict[str, _Entry] = {}
            if not held or 2 * (held + size) > self.size:
                entries = self._entries()
                entries.pop(key, None)
                held = sum(entry.size for entry in entries.values())
            for other, entry in sorted(entries.items(), key=lambda item: item[1].used):
                if held + size <= self.size:
                    break
                if self._evict(other):
                    held -= entry.size
                    del entries[other]
            if held + size > self.size:
                raise StorageError(
                    f"a file of {size} bytes {NO_ROOM} in the cache {self.directory} of {self.size} bytes, where "
                    f"{held} bytes are in use in {len(entries)} files; make LIBAI_DATA_CACHE_SIZE larger"
                )
            with open(self.directory / f"{key}.room", "wb") as room:
                room.truncate(size)  # takes no space on the disk
            with contextlib.suppress(OSError):  # A full disk.
                os.pwrite(lock, (held + size).to_bytes(8, "little"), 0)

    def _entries(self) -> dict[str, _Entry]:
        found: dict[str, _Entry] = {}
        with os.scandir(self.directory) as files:
            for file in files:
                match = _NAME.fullmatch(file.name)
                if match is None:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = file.stat()
                    entry = found.setdefault(match["key"], _Entry())
                    if _INDEX.fullmatch(file.name):
                        entry.index += status.st_size
                    elif file.name.endswith(".lock"):
                        entry.used = status.st_mtime_ns
                    else:
                        # A file that is being made has a promise of its whole size beside it.
                        entry.copy = max(entry.copy, status.st_size)
        return found

    def _evict(self, key: str) -> bool:
        lock = self._open_lock(f"{key}.lock")
        try:
            if not _is_alone_with(lock) or is_used(self.directory, key):
                return False
            # The lock goes last: who waits for it sees that it has gone, and begins anew.
            for path in (*self.directory.glob(f"{key}-*"), *(self.directory / f"{key}{end}" for end in _ENDINGS)):
                path.unlink(missing_ok=True)
            return True
        finally:
            os.close(lock)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[int]:
        lock = self._open_lock("cache.lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock
        finally:
            os.close(lock)

    def _open_lock(self, name: str) -> int:
        try:
            try:
                return os.open(self.directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                self.directory.mkdir(parents=True, exist_ok=True)
                return os.open(self.directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(
                f"no files can be kept in {self.directory} ({error}); set LIBAI_DATA_CACHE_DIR to another folder"
            ) from error

    def _is_current(self, lock: int, name: str) -> bool:
        """Whether a lock's file is still the one that others will find."""
        try:
            return os.path.samestat(os.fstat(lock), os.stat(self.directory / name))
        except FileNotFoundError:
            return False


def _is_whole(copy: Path, size: int | None) -> bool:
    try:
        found = copy.stat().st_size
    except FileNotFoundError:
        return False
    return size is None or found == size


def _is_alone_with(lock: int) -> bool:
    """Hold a lock, if nobody else holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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

    def is_current(self, folder: Path) -> bool:
        """Whether other processes look here: not if someone has deleted the folder."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.stat(folder / _IN_USE))
        except FileNotFoundError:
            return False

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

    Returns:
        What ends the use, in this process.

    Raises:
        OSError: The folder cannot be written to, or the copy is just being removed.
    """
    with _guard:
        uses = _current.get(folder)
        if uses is None or not uses.is_current(folder):
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
    return os.open(folder / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


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
