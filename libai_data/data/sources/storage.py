"""Open local files in place, and files of a store as copies in a local cache.

A store is any that fsspec supports: s3://, gs://, http:// and others. fsspec reads credentials and settings from the
environment (such as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL) and from ~/.config/fsspec.

All processes of a node share the copies in the folder `files` of LIBAI_DATA_CACHE_DIR (by default ~/.cache/libai_data).
LIBAI_DATA_CACHE_SIZE limits their bytes (by default 64GB). Each request has LIBAI_DATA_STORAGE_ATTEMPTS attempts (by
default 5).
"""

from __future__ import annotations

import glob
import os
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Callable

from libai_data.atomic_files import PathLike
from libai_data.data.files.identity import key_of
from libai_data.data.sources.file_formats import check_no_table, is_left_out
from libai_data.data.sources.local_cache import LocalCache
from libai_data.data.sources.paths import check_is_file, checked_path, is_file, why_missing
from libai_data.data.sources.remote import as_requested, fetch, is_remote, list_files, look_up, without_protocol
from libai_data.errors import ConfigError, StorageError
from libai_data.errors.argument_rules import PATH, check

CACHE_DIR, CACHE_SIZE, ATTEMPTS = "LIBAI_DATA_CACHE_DIR", "LIBAI_DATA_CACHE_SIZE", "LIBAI_DATA_STORAGE_ATTEMPTS"

_LONGEST_NAME = 100


@dataclass(frozen=True)
class Storage:
    """Settings for files of stores.

    Attributes:
        directory: folder of the copies, on a disk of this node.
        size: most bytes of all copies together.
        attempts: most attempts for a request.

    Raises:
        ConfigError: A number is below 1.
    """

    directory: Path
    size: int
    attempts: int = 5

    def __post_init__(self) -> None:
        for name, variable in (("size", CACHE_SIZE), ("attempts", ATTEMPTS)):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"the {name} of a storage ({variable}) is {value}; it must be at least 1")

    @classmethod
    def from_environment(cls) -> Storage:
        """Read LIBAI_DATA_CACHE_DIR, LIBAI_DATA_CACHE_SIZE and LIBAI_DATA_STORAGE_ATTEMPTS."""
        attempts = os.environ.get(ATTEMPTS, "5")
        if not attempts.isdecimal():
            raise ConfigError(f"{ATTEMPTS} is {attempts!r}; it must be a number of attempts, such as 5")
        size = _bytes_of(CACHE_SIZE, os.environ.get(CACHE_SIZE, "64GB"))
        return cls(cache_home() / "files", size, int(attempts))


class LocalFile:
    """A file that this machine can open: a local file, or a local copy of a store's file.

    The copy stays in the cache until this object is closed or garbage-collected; after a fork, in all processes. When
    the object is unpickled, it opens the file again; if the file has changed, it raises an error.

    Args:
        source: path or address.
        storage: where copies are kept; by default as the environment sets it.
        identity: identity that a file of a store must have; by default any.

    Attributes:
        source: absolute path, or address.
        path: path at which this machine can open the file.
        identity: for a file of a store, a key that changes with the content; "" for a local file.

    Raises:
        ConfigError: There is no such file, or the package for the store is not installed.
        StorageError: The file cannot be fetched, has another identity, or does not fit into the cache.
    """

    def __init__(self, source: PathLike, storage: Storage | None = None, identity: str = "") -> None:
        check({"file": PATH}, file=source)
        self.source = str(source)
        self.identity = ""
        self._storage = storage
        if is_remote(self.source):
            kept = storage or Storage.from_environment()
            remote = look_up(self.source, kept.attempts)
            self.identity = self._checked(remote.identity, identity)
            key = key_of(remote.url, remote.identity)
            self._hold(kept, key, remote.size, lambda part: fetch(remote, part, kept.attempts))
        else:
            self.path = Path(without_protocol(self.source))
            check_is_file(self.path, "", "file ")
            # Before the file is opened, this process may change its working folder, or send this object to another one.
            self.path = self.path.absolute()
            self.source = str(self.path)

    _release: weakref.finalize | None = None

    def close(self) -> None:
        """Allow the cache to delete the copy. A copy that is open or mapped stays readable."""
        if self._release is not None:
            self._release()

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.source, self._storage, self.identity)

    def _checked(self, found: str, expected: str) -> str:
        if expected and found != expected:
            raise StorageError(
                f"{self.source} has changed since it was first opened; start again with the current file"
            )
        return found

    def _hold(
        self, storage: Storage, key: str, size: int | None, make: Callable[[Path], None], ending: str = ""
    ) -> None:
        """Use a copy in the cache until this object is closed; see `LocalCache.hold`. Its name leaves out an ending."""
        name = re.sub(r"[^A-Za-z0-9._-]", "_", re.split(r"[?#]", self.source)[0].rpartition("/")[2])[-_LONGEST_NAME:]
        cache = LocalCache(storage.directory, storage.size)
        self.path, release = cache.hold(key, name.removesuffix(ending), size, make)
        self._release = weakref.finalize(self, release)


def cache_home() -> Path:
    """The folder of the caches: LIBAI_DATA_CACHE_DIR, by default ~/.cache/libai_data."""
    named = os.environ.get(CACHE_DIR)
    if named:
        return checked_path(CACHE_DIR, named)
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if caches.startswith("~"):
        raise ConfigError(f"this user has no home directory to keep files in; set {CACHE_DIR} to a folder")
    return Path(caches) / "libai_data"


def local_path(path: PathLike) -> Path:
    """The path at which this machine can open a file.

    A file of a store is copied, and the copy is in use until this process ends. If you need many files one after the
    other, open each as a `LocalFile` and close it.

    Args:
        path: path or address.

    Raises:
        ConfigError: There is no such file, or the package for the store is not installed.
        StorageError: The file cannot be fetched, or does not fit into the cache.
    """
    return _kept(str(path)).path if is_remote(str(path)) else LocalFile(path).path


def patterns_of(patterns: Any) -> list[str]:
    """One pattern, or several, as a list of texts; a ConfigError if a pattern is no path."""
    # Mappings and sets are refused: keys are no list of files, and the order of a set differs between processes.
    is_list = isinstance(patterns, Iterable) and not isinstance(patterns, (str, bytes, os.PathLike, Mapping, Set))
    found = list(patterns) if is_list else [patterns]
    for pattern in found:
        check({"files": _FILES}, files=pattern)
    return list(map(str, found))


_FILES = PATH._replace(allowed="a file, a glob or a folder, as text or path, or a list of these")


def listed(patterns: PathLike | Sequence[PathLike]) -> list[str]:
    """The files that `patterns` name, each once, in the order of the patterns; the files of a pattern sorted by path.

    Args:
        patterns: one or several files, globs ("**" for any depth) or folders, as paths or addresses. A folder means
            all its files except hidden ones and those that `is_left_out` lists, also the files in linked folders.

    Raises:
        ConfigError: A pattern names no file, a broken link, or a table of Delta Lake, Iceberg or Hudi; or the package
            for the store is not installed.
        StorageError: A store does not answer.
    """
    found: dict[str, str] = {}
    real_folder = cache(os.path.realpath)
    for text in patterns_of(patterns):
        remote = is_remote(text)
        paths = list_files(text, Storage.from_environment().attempts) if remote else sorted(_local_files(text))
        if not paths:
            why = "" if remote else why_missing(without_protocol(text))
            raise ConfigError(f"no file is named by {text!r}{why}; give files, globs (in quotes) or folders")
        if remote or not is_file(without_protocol(text)):
            check_no_table(without_protocol(text), paths, is_local=not remote)
        for path in paths:
            folder, name = os.path.split(path)
            # A path may be relative, or lead through a linked folder.
            found.setdefault(as_requested(path) if remote else os.path.join(real_folder(folder), name), path)
    if not found:
        raise ConfigError("no files are given; give files, globs (in quotes) or folders")
    return list(found.values())


def _local_files(pattern: str) -> list[str]:
    """The local files that a file, a glob or a folder names, in no order; for a folder, all files but hidden ones."""
    path = Path(without_protocol(pattern))
    if is_file(path):
        return [str(path)]
    names = _paths_inside(path) if os.path.isdir(path) else glob.glob(str(path), recursive=True)
    for name in names:
        if os.path.islink(name) and not os.path.exists(name):
            raise ConfigError(f"{name} is a link whose target does not exist; remove the link, or restore the target")
    return [name for name in names if os.path.isfile(name)]


def _paths_inside(folder: Path) -> list[str]:
    """All files below a folder that are not hidden; linked folders are followed, each folder once."""
    found: list[str] = []
    seen: set[str] = set()
    for root, folders, names in os.walk(folder, followlinks=True, onerror=_raised):
        real = os.path.realpath(root)
        folders[:] = [] if real in seen else sorted(name for name in folders if not is_left_out(f"{name}/"))
        found += [os.path.join(root, name) for name in names if not (real in seen or is_left_out(name))]
        seen.add(real)
    return found


def _raised(error: OSError) -> None:
    raise error


def _bytes_of(name: str, text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]+)?)\s*(?:([KMGT])(i?))?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{name} is {text!r}; it must be a number of bytes, such as 500MB or 64GiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** "_KMGT".index((match[2] or "_").upper()))


@cache
def _kept(url: str) -> LocalFile:
    return LocalFile(url)
