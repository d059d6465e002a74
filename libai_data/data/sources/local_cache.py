"""The cache: a folder of bounded size with copies of files, shared by all processes of a node.

Locks on single bytes of one file mark the copies in use, so one descriptor is enough for any number of copies. The
locks belong to an open file description (fcntl(2), "Open file description locks"): a forked process has them too, and
the system releases them when the last process with the description ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Callable

from libai_data.atomic_files import written_whole
from libai_data.data.failure_notes import Failures, lock, note_failure, try_lock
from libai_data.errors import ConfigError, StorageError

_ENDINGS = (".part", ".room", ".lock")
_NAME = re.compile(r"(?P<key>[0-9a-f]{24})(?:\.(?:lock|part|room)|-.*)")
_INDEX = re.compile(r".*-[0-9a-f]{24}\.(?:npy|lock|unfinished)")  # see `record_index`
_FLOCK = struct.Struct("hhqqi0q")
_IN_USE, _ASKED = "in_use", "asked"
_MOST_DELETIONS = 5
"""After so many deletions of the folder, no copy is made any more."""
_DIGITS = 15  # The first digits of a key are the offset of its byte; an offset has 63 bits.
NO_ROOM = "finds no room"
"""Words in the error of a full cache, by which callers recognize it."""
_guard = threading.RLock()


@dataclass
class _Entry:
    """One file in the cache: bytes of its copy or reserved for it, bytes of its index, and its last use (ns)."""

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
        size: most bytes of all copies together.
    """

    directory: Path
    size: int

    def hold(
        self, key: str, name: str, size: int | None, make: Callable[[Path], None]
    ) -> tuple[Path, Callable[[], None]]:
        """Use the copy of a file; make the copy if the cache does not have it.

        If several processes need the copy at once, one makes it, and the others wait. If the making fails, all raise an
        error. If the process dies, the next one makes the copy. A copy appears complete or not at all.

        Args:
            key: key of the file and its version: 24 hexadecimal digits.
            name: end of the copy's file name.
            size: bytes of the copy; None if not known.
            make: writes the copy to the given path.

        Returns:
            The path, and a function that ends the use. A forked process must call it itself.

        Raises:
            ConfigError: The folder cannot be written to.
            StorageError: There is no room, the process that was making the copy has failed, or files are deleted in the
                folder again and again.
        """
        copy = self.directory / f"{key}-{name}"
        deletions = 0
        while True:
            try:
                with self._open_lock(f"{key}.lock") as descriptor:
                    noted = lock(descriptor, f"fetching {copy.name}")
                    if not _is_at(descriptor, self.directory / f"{key}.lock"):
                        continue  # The copy and its lock were removed meanwhile.
                    if not _is_whole(copy, size):
                        self._make(key, copy, size, make, descriptor, noted)
                    os.utime(descriptor)
                    return copy, use(self.directory, key)
            except FileNotFoundError as error:
                # Another process may make the copy now, so this process must wait for the new lock.
                deletions += 1
                if deletions == _MOST_DELETIONS:
                    raise StorageError(
                        f"{copy.name} cannot be kept in {self.directory}: something deletes files there"
                    ) from error

    def expect(self, key: str, when: int) -> None:
        """Set the priority of a copy to a modification time (ns): the cache first removes the copy with the lowest
        priority that is not in use."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.directory / f"{key}.lock", ns=(when, when))

    def ask_for_room(self) -> None:
        """Ask the processes that do not read now to end their uses; see `asked`."""
        with contextlib.suppress(OSError):
            (self.directory / _ASKED).touch()

    def asked(self) -> float:
        """When a process has last asked for room; 0 if never."""
        try:
            return (self.directory / _ASKED).stat().st_mtime
        except OSError:
            return 0.0

    def _make(
        self, key: str, copy: Path, size: int | None, make: Callable[[Path], None], descriptor: int, noted: Failures
    ) -> None:
        if noted.times > 0:
            raise StorageError(f"the process that was fetching {copy.name} has failed: {noted.reason}")
        try:
            with written_whole(copy, self.directory / f"{key}.part") as part:
                self._make_room(key, size or 0)
                make(part)
                if size is None:
                    self._make_room(key, part.stat().st_size)
        except FileNotFoundError:  # The caller tries again.
            raise
        except Exception as error:
            note_failure(descriptor, error)
            raise
        finally:
            (self.directory / f"{key}.room").unlink(missing_ok=True)

    def _make_room(self, key: str, size: int) -> None:
        """Remove copies until a file of `size` bytes fits, and reserve its room."""
        with self._open_lock("cache.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # The lock file has an upper bound of the copies' bytes: the last count and what was reserved since then. A
            # count stats each file, so it waits until half of the cache may be full. Indices fit into the other half.
            held = int.from_bytes(os.pread(lock, 8, 0), "little")
            entries: dict[str, _Entry] = {}
            if not held or 2 * (held + size) > self.size:
                entries = self._entries()
                entries.pop(key, None)
                held = sum(entry.size for entry in entries.values())
            candidates = [(entry.used, other) for other, entry in entries.items()]
            heapify(candidates)
            while candidates and held + size > self.size:
                used, other = heappop(candidates)
                now = self._evict(other, used)
                if now is None:
                    held -= entries.pop(other).size
                elif now != used:  # It was in use during the count.
                    heappush(candidates, (now, other))
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
                        # While a copy is being made, its `.room` file has the whole size that is reserved.
                        entry.copy = max(entry.copy, status.st_size)
        return found

    def _evict(self, key: str, used: int) -> int | None:
        """Remove a copy of this priority. Returns None if removed, `used` if it is in use, or else the new priority."""
        with self._open_lock(f"{key}.lock") as lock:
            if not try_lock(lock) or is_used(self.directory, key):
                return used
            now = os.fstat(lock).st_mtime_ns
            if now != used:
                return now
            # The lock file is removed last: a process that waits for the lock sees this, and starts again.
            for path in (*self.directory.glob(f"{key}-*"), *(self.directory / f"{key}{end}" for end in _ENDINGS)):
                path.unlink(missing_ok=True)
            return None

    @contextlib.contextmanager
    def _open_lock(self, name: str) -> Iterator[int]:
        """A lock file in the folder, which is open within the block, and then loses its lock."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(
                f"no files can be kept in {self.directory} ({error}); set LIBAI_DATA_CACHE_DIR to another folder"
            ) from error
        try:
            yield lock
        finally:
            os.close(lock)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at a path, which other processes open."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _is_whole(copy: Path, size: int | None) -> bool:
    try:
        return size in (None, copy.stat().st_size)
    except FileNotFoundError:
        return False


_current: dict[Path, _Uses] = {}


class _Uses:
    """The copies that this process uses through one open file description."""

    def __init__(self, folder: Path) -> None:
        self.descriptor = _opened(folder)
        # Not closed by the last `remove`, which the garbage collector may call within `use`.
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        self._counts: Counter[str] = Counter()
        self.is_shared = False
        """Whether a forked process has the description too, so that bytes must stay locked after this process's use."""

    def add(self, key: str) -> None:
        self._counts[key] += 1
        if self._counts[key] == 1 and not _lock(self.descriptor, key, fcntl.F_RDLCK):
            del self._counts[key]
            raise BlockingIOError(f"the copy {key} is being removed")

    def remove(self, folder: Path, key: str) -> None:
        with _guard:
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
                if not self.is_shared:
                    _lock(self.descriptor, key, fcntl.F_UNLCK)
            if not self._counts and _current.get(folder) is self:
                del _current[folder]


def use(folder: Path, key: str) -> Callable[[], None]:
    """Mark a copy as in use; returns a function that ends the use in this process. An OSError if the folder cannot be
    written to, or another process is removing the copy."""
    with _guard:
        uses = _current.get(folder)
        if uses is None or not _is_at(uses.descriptor, folder / _IN_USE):  # The folder was deleted meanwhile.
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
