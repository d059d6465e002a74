"""Look up, list and fetch files in a store (s3://, gs://, http and others of fsspec), with retries."""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import logging
import os
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, TypeVar
from urllib.parse import unquote

from libai_data.data.files.identity import digest_of_file, key_of
from libai_data.errors import ConfigError, StorageError, installed

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_FIRST_WAIT = 0.5
_LONGEST_WAIT = 30.0
_SECONDS_OF_SILENCE = 30.0
_EXTRA_OF_PROTOCOL = {"s3": "remote", "s3a": "remote"}
# What stores call that by which a changed object differs from what it was.
_VERSION_KEYS = (
    *("ETag", "etag", "VersionId", "generation", "md5Hash", "crc32c", "Content-MD5"),
    *("LastModified", "last_modified", "Last-Modified", "updated", "mtime", "created"),
)
# Answers that another attempt does not change.
_DENIED = (401, 403)
_FOR_GOOD = (*_DENIED, 404, 410)
_LIST_NO_MORE = (FileNotFoundError, NotADirectoryError)


@dataclass(frozen=True)
class RemoteFile:
    """A file of a store as it was found there.

    Attributes:
        url: its address.
        size: bytes, if the store reports them.
        md5: of the content in hexadecimal, if the store reports it.
        md5_is_sure: whether `md5` is an md5 sum for certain; S3 reports other tags for some encrypted objects.
        identity: changes when the content does.
    """

    url: str
    size: int | None
    md5: str | None
    md5_is_sure: bool
    identity: str


def is_remote(path: str) -> bool:
    """Whether a path leads to a store; plain paths and file:// ones do not."""
    protocol = _protocol_of(path)
    return protocol not in ("", "file", "local")


def without_protocol(path: str) -> str:
    """A local path as the system takes it."""
    return re.sub(r"^(file|local)://", "", path)


def look_up(url: str, attempts: int) -> RemoteFile:
    """Ask the store for a file.

    Raises:
        ConfigError: There is no such file, or what reads such a store is not installed.
        StorageError: The store does not answer.
    """

    def ask() -> RemoteFile:
        store, name = _store_of(url)
        store.invalidate_cache()  # what a listing said may be old
        return _described(url, store.info(name))

    return _patiently(url, "looked up", ask, attempts)


def list_files(url: str, attempts: int) -> list[str]:
    """The files that a glob or a folder of a store names, sorted; none where there are none.

    Args:
        url: a file, a glob ("**" for any depth), or a folder, of which all files count but hidden ones.
        attempts: how often to ask.

    Raises:
        ConfigError: What reads such a store is not installed.
        StorageError: The store does not answer.
    """

    def ask() -> list[str]:
        store, name = _store_of(url)
        store.invalidate_cache()
        if not url.endswith("/") and store.isfile(name):
            return [url]
        if "*" not in url and store.isdir(name):
            folder = str(name).rstrip("/")
            found = [path for path in store.find(folder) if not re.search(r"(^|/)\.", path[len(folder) :])]
        else:
            found = [path for path, info in store.glob(name, detail=True).items() if info["type"] == "file"]
        # Web servers give names that are quoted, which are sorted as local names are.
        key = unquote if _protocol_of(url).startswith("http") else None
        return sorted((str(store.unstrip_protocol(path)) for path in found), key=key)

    try:
        return _patiently(url, "listed", ask, attempts)
    except ConfigError as error:
        if isinstance(error.__cause__, _LIST_NO_MORE):
            return []
        raise


def read_ranges(url: str, read: Callable[[Any], _Result], attempts: int) -> _Result:
    """Read parts of a file of a store.

    Args:
        url: the file's address.
        read: gets the open file, which asks the store for what is read of it.
        attempts: how often to ask.

    Raises:
        ConfigError: There is no such file, or what reads such a store is not installed.
        StorageError: The store does not answer, gives no parts of files, or `read` fails.
    """

    def ask() -> _Result:
        store, name = _store_of(url)
        with store.open(name, "rb", cache_type="none") as file:
            return read(file)

    return _patiently(url, "read in parts", ask, attempts)


_WHILE_FETCHED = "while it was fetched; start again when nothing writes to it any more"


def fetch(remote: RemoteFile, target: Path, attempts: int, changed: str = _WHILE_FETCHED) -> None:
    """Copy a file of a store, and check the copy.

    Args:
        remote: the file, as it must still be.
        target: where to; after an error, what is there is worth nothing.
        attempts: how often to begin.
        changed: what the error of a changed file says of it: since when, and what to do.

    Raises:
        ConfigError: It is not there any more.
        StorageError: It cannot be fetched whole, has changed, or there is no space on the disk.
    """
    digests: list[str] = []

    def copy() -> None:
        store, name = _store_of(remote.url)
        target.parent.mkdir(parents=True, exist_ok=True)  # if someone has deleted the cache meanwhile
        try:
            store.get_file(name, os.path.abspath(target))  # fsspec gives "~" and "file:" meanings of its own
        except FileNotFoundError as error:
            if error.filename != os.path.abspath(target):
                raise
            raise StorageError(f"{target.parent} was deleted meanwhile") from error
        store.invalidate_cache()
        if _described(remote.url, store.info(name)).identity != remote.identity:
            raise _Changed
        size = target.stat().st_size
        if remote.size is not None and size != remote.size:
            raise StorageError(f"{size} bytes arrived of {remote.size}")
        if remote.md5 is not None:
            digests.append(md5_of(target))
            # Encrypted objects of S3 have tags that look like sums: bytes that come twice alike are right.
            if digests[-1] != remote.md5 and (remote.md5_is_sure or digests.count(digests[-1]) < 2):
                raise StorageError(f"what arrived has the md5 sum {digests[-1]}, the store says {remote.md5}")

    try:
        _patiently(remote.url, "fetched", copy, attempts)
    except _Changed:
        raise StorageError(f"{remote.url} has changed {changed}") from None


def write_file(url: str, content: bytes, attempts: int) -> None:
    """Write a file of a store.

    Raises:
        ConfigError: The store lets nobody write, or this user.
        StorageError: The store does not answer.
    """

    def write() -> None:
        store, name = _store_of(url)
        try:
            store.pipe_file(name, content)
        except NotImplementedError as error:
            raise ConfigError(f"{url} cannot be written: the store is for reading alone") from error

    _patiently(url, "written", write, attempts)


def md5_of(path: Path) -> str:
    """The MD5 sum of a file, in hexadecimal."""
    return digest_of_file(path, hashlib.md5())


class _Changed(Exception):
    """A file is another one than it was before."""


def _protocol_of(path: str) -> str:
    return path.split("://", 1)[0] if "://" in path else ""


def _store_of(url: str) -> tuple[Any, str]:
    """The file system of fsspec, and the path there."""
    if "::" in url:
        raise ConfigError(f"{url} is a chain of addresses; give the address of a file itself")
    import fsspec

    protocol = _protocol_of(url)
    try:
        options = _OPTIONS[protocol]() if protocol in _OPTIONS else {}
        store, name = fsspec.core.url_to_fs(url, **options)
        if protocol in _EXTRA_OF_PROTOCOL:
            store.retries = 1  # `_patiently` repeats what fails
    except ImportError as error:
        extra = _EXTRA_OF_PROTOCOL.get(protocol)
        install = f"pip install libai_data[{extra}]" if extra else "install what the message names"
        raise ConfigError(f"{url} cannot be read: {error}; {install}") from error
    except ValueError as error:
        raise ConfigError(f"{url} cannot be read: {error}") from error
    return store, name


def _http_options() -> dict[str, Any]:
    """fsspec would give up any file after five minutes; only a silent server is worth giving up."""
    aiohttp = installed("aiohttp", "reading files by http", "libai_data[remote]")
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SECONDS_OF_SILENCE, sock_read=_SECONDS_OF_SILENCE)
    return {"client_kwargs": {"timeout": timeout}}


def _s3_options() -> dict[str, Any]:
    """botocore and s3fs would each try five times, so that a silent store would cost half an hour in each attempt."""
    import fsspec

    patience = {"connect_timeout": _SECONDS_OF_SILENCE, "read_timeout": _SECONDS_OF_SILENCE}
    own = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
    return {"config_kwargs": {"retries": {"total_max_attempts": 1}, **patience, **own}}


_OPTIONS = {"http": _http_options, "https": _http_options, "s3": _s3_options, "s3a": _s3_options}


def _described(url: str, info: dict[str, Any]) -> RemoteFile:
    if info.get("type") == "directory":
        raise ConfigError(f"{url} is a folder, where a file is expected")
    md5, sure = _told_md5(_protocol_of(url), info)
    version = {key: str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None}
    return RemoteFile(url, info.get("size"), md5, sure, key_of(info.get("size"), sorted(version.items())))


def _told_md5(protocol: str, info: dict[str, Any]) -> tuple[str | None, bool]:
    for key in ("md5Hash", "Content-MD5"):
        if info.get(key):
            try:
                found = base64.b64decode(info[key], validate=True)
            except (binascii.Error, ValueError):
                continue
            if len(found) == hashlib.md5().digest_size:
                return found.hex(), True
    tag = str(info.get("ETag", "")).strip('"')
    # The tag of an object of several parts is none: it ends with "-" and their number.
    if protocol in ("s3", "s3a") and re.fullmatch(r"[0-9a-f]{32}", tag):
        return tag, False
    return None, False


def _patiently(url: str, what: str, act: Callable[[], _Result], attempts: int) -> _Result:
    """Do something with a store, again after a while if it fails in a way that may pass.

    Waits double from attempt to attempt; each is drawn from its upper half, so that many readers do not return at once.
    """
    drawn = random.Random(os.urandom(8))  # never the generator of a sample
    for attempt in range(1, attempts + 1):
        try:
            return act()
        except (ConfigError, _Changed):
            raise
        except Exception as error:  # each store has errors of its own
            _raise_if_for_good(url, what, error)
            if attempt == attempts:
                times = "once" if attempts == 1 else f"in {attempts} attempts"
                raise StorageError(f"{url} could not be {what} {times}; the last error: {_told(error)}") from error
            wait = min(_FIRST_WAIT * 2 ** (attempt - 1), _LONGEST_WAIT) * drawn.uniform(0.5, 1)
            logger.warning(
                "%s could not be %s (%s); attempt %d of %d in %.1f s.",
                *(url, what, _told(error), attempt + 1, attempts, wait),
            )
            time.sleep(wait)
    raise ConfigError(f"{url} cannot be {what} in {attempts} attempts; set at least 1")


def _raise_if_for_good(url: str, what: str, error: Exception) -> None:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        raise StorageError(
            f"{url} cannot be {what}: {error}; make room on the disk, or set LIBAI_DATA_CACHE_DIR to another folder"
        ) from error
    # fsspec's http tells of any failure as a file that is not there, for the cause of that failure.
    status = getattr(error.__cause__, "status", None)
    passing = _protocol_of(url).startswith("http") and error.__cause__ is not None and status not in _FOR_GOOD
    if status in _DENIED or (isinstance(error, PermissionError) and not passing):
        cause = error.__cause__ if status in _DENIED else error
        raise ConfigError(f"{url} cannot be {what}: access is denied ({cause}); look at the credentials") from cause
    if isinstance(error, _LIST_NO_MORE) and not passing:
        raise ConfigError(f"there is no {url}") from error


def _told(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ is not None else error
    return f"{type(cause).__name__}: {cause}".rstrip(": ")
