"""Look up, list and fetch files of a store (s3://, gs://, http and others of fsspec), with retries."""

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
from string import punctuation
from typing import Any, Callable, TypeVar
from urllib.parse import quote, unquote

from libai_data.data.files.identity import digest_of_file, key_of
from libai_data.data.sources.file_formats import is_left_out
from libai_data.errors import ConfigError, StorageError, installed

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_FIRST_WAIT = 0.5
_LONGEST_WAIT = 30.0
_SECONDS_OF_SILENCE = 30.0
# Linux keeps the bytes of one write in large pages, which are faster to read. By default, fsspec writes small pieces.
_BYTES_OF_A_WRITE = 1 << 23
_EXTRA_OF_PROTOCOL = {"s3": "remote", "s3a": "remote"}
# Keys under which stores report a version of an object, which changes with its content.
_VERSION_KEYS = (
    *("ETag", "etag", "VersionId", "generation", "md5Hash", "crc32c", "Content-MD5"),
    *("LastModified", "last_modified", "Last-Modified", "updated", "mtime", "created"),
)
# HTTP status codes that a retry does not change.
_DENIED = (401, 403)
_GONE = (404, 410)
_PERMANENT = (*_DENIED, *_GONE)
_ABSENT = (FileNotFoundError, NotADirectoryError)


@dataclass(frozen=True)
class RemoteFile:
    """A file of a store, as the store describes it."""

    url: str
    size: int | None  # bytes; None if the store does not report them
    md5: str | None  # of the content, hexadecimal; None if the store does not report it
    md5_is_sure: bool  # False for tags of S3, which are no MD5 digests for some encrypted objects
    identity: str  # a key that changes when the content changes


def is_remote(path: str) -> bool:
    """Whether a path is an address in a store; plain paths and file:// paths are not."""
    protocol = _protocol_of(path)
    return protocol not in ("", "file", "local")


def without_protocol(path: str) -> str:
    """A local path without file:// or local://."""
    return re.sub(r"^(file|local)://", "", path)


def as_requested(url: str) -> str:
    """The address that is sent to the store. Characters of a web server's may be given with or without quotes."""
    return quote(url, safe=punctuation) if _is_http(url) else url


def look_up(url: str, attempts: int) -> RemoteFile:
    """Ask the store for the size and version of a file. A ConfigError if there is no such file, access is denied, or
    the package for the store is not installed; a StorageError if the store does not answer."""

    def ask(store: Any, name: str) -> RemoteFile:
        store.invalidate_cache()  # a cached listing may be old
        return _described(url, store.info(name))

    return _with_retries(url, "looked up", ask, attempts)


def list_files(url: str, attempts: int) -> list[str]:
    """The addresses of the files that a glob or a folder of a store names, sorted; empty if there are none. Errors are
    as those of `look_up`.

    Args:
        url: a file, a glob ("**" for any depth), or a folder, for all its files except hidden ones.
    """

    def ask(store: Any, name: str) -> list[str]:
        store.invalidate_cache()
        if not url.endswith("/") and _is_file(store, name):
            return [url]
        if "*" not in url and store.isdir(name):
            folder = str(name).rstrip("/")
            found = [path for path in store.find(folder) if not is_left_out(path[len(folder) :])]
        else:
            found = [path for path, info in store.glob(name, detail=True).items() if info["type"] == "file"]
        # Web servers return quoted names. Sort them like the same files on a local disk.
        key = unquote if _is_http(url) else None
        return sorted((_address_like(url, str(name), path) for path in found), key=key)

    try:
        return _with_retries(url, "listed", ask, attempts)
    except ConfigError as error:
        if isinstance(error.__cause__, _ABSENT):
            return []
        raise


def _address_like(url: str, name: str, path: str) -> str:
    """The address of a path in a store, spelled as `url`, whose own path is `name`. fsspec spells some addresses
    differently (s3:// for s3a://), or without their host (hdfs://, sftp://)."""
    url, name = url.rstrip("/"), name.rstrip("/")
    tail = next(name[cut:] for cut in range(len(name) + 1) if url.endswith(name[cut:]))
    return url[: len(url) - len(tail)] + path[len(name) - len(tail) :]


def _is_file(store: Any, name: str) -> bool:
    """Whether a store has this file. `isfile` of web servers is False after any failure, also one that passes."""
    if "*" in name or not _is_http(name):
        return bool(store.isfile(name))
    try:
        return not _is_folder(name, store.info(name))
    except FileNotFoundError as error:
        if getattr(error.__cause__, "status", 404) not in _GONE:
            raise
        return False


def read_ranges(url: str, read: Callable[[Any], _Result], attempts: int) -> _Result:
    """The result of `read`, a function of the open file of a store; each of its reads requests only this range. Errors
    are as those of `look_up`; also a StorageError if the store does not support ranges, or `read` fails."""

    def ask(store: Any, name: str) -> _Result:
        with store.open(name, "rb", cache_type="none") as file:
            return read(file)

    return _with_retries(url, "read in parts", ask, attempts)


_WHILE_FETCHED = "while it was fetched; start again when no process writes to it any more"


def fetch(remote: RemoteFile, target: Path, attempts: int, changed: str = _WHILE_FETCHED) -> None:
    """Copy a file of a store to a local path, and verify size, version and MD5 digest.

    Args:
        target: path of the copy; after an error, the copy may be incomplete.
        changed: end of the message if the file has changed or was removed: since when, and what to do.

    Raises:
        ConfigError: The file does not exist any more, or access is denied.
        StorageError: The file cannot be fetched completely or has changed, or the disk is full.
        FileNotFoundError: The copy, or its folder, was deleted meanwhile.
    """
    digests: list[str] = []
    path = Path(os.path.abspath(target))  # fsspec would interpret "~" and "file:"

    def copy(store: Any, name: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)  # the user may have deleted the cache meanwhile
        with open(path, "wb", buffering=_BYTES_OF_A_WRITE) as file:
            store.get_file(name, file if _is_http(remote.url) else str(path))
            file.flush()
            store.invalidate_cache()
            now = _described(remote.url, store.info(name))
            if now.identity != remote.identity:
                same = f"{now.size} bytes as before, but another version (by ETag, or time of change)"
                raise _Changed(same if now.size == remote.size else f"{now.size} bytes instead of {remote.size}")
            # After a deletion, another process may write to this path.
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise FileNotFoundError(errno.ENOENT, "it was deleted", str(path))
        size = path.stat().st_size
        if remote.size is not None and size != remote.size:
            raise StorageError(f"{size} of {remote.size} bytes arrived")
        if remote.md5 is not None:
            digests.append(md5_of(path))
            # Tags of encrypted S3 objects only look like MD5. Accept content that arrives equal in two attempts.
            if digests[-1] != remote.md5 and (remote.md5_is_sure or digests.count(digests[-1]) < 2):
                raise StorageError(
                    f"the bytes that arrived have the md5 sum {digests[-1]}, but the store reports {remote.md5}"
                )

    def copy_unless_deleted(store: Any, name: str) -> FileNotFoundError | None:
        try:
            copy(store, name)
        except FileNotFoundError as error:
            if str(error.filename) != str(path):
                raise
            return error
        return None

    try:
        deleted = _with_retries(remote.url, "fetched", copy_unless_deleted, attempts)
        if deleted is not None:
            raise deleted
    except _Changed as found:
        raise StorageError(f"{remote.url} has changed {changed}. The store reports: {found}") from None
    except ConfigError as error:
        if not isinstance(error.__cause__, _ABSENT):
            raise
        raise ConfigError(f"{error}: it was removed {changed}") from error.__cause__


def write_file(url: str, content: bytes, attempts: int) -> None:
    """Write a file to a store. A ConfigError if the store is read-only, or this user may not write; a StorageError if
    the store does not answer."""

    def write(store: Any, name: str) -> None:
        try:
            store.pipe_file(name, content)
        except NotImplementedError as error:
            raise ConfigError(f"{url} cannot be written: this package only reads from stores") from error

    _with_retries(url, "written", write, attempts)


def md5_of(path: Path) -> str:
    """The MD5 digest of a file, hexadecimal."""
    return digest_of_file(path, hashlib.md5())


class _Changed(Exception):
    """A file of a store has changed."""


def _protocol_of(path: str) -> str:
    return path.split("://", 1)[0] if "://" in path else ""


def _is_http(url: str) -> bool:
    return _protocol_of(url) in ("http", "https")


def _store_of(url: str) -> tuple[Any, str]:
    """The fsspec file system of an address, and the path in this file system."""
    if "::" in url:
        raise ConfigError(f"{url} is a chain of addresses; give the address of a file itself")
    import fsspec

    protocol = _protocol_of(url)
    try:
        options = _OPTIONS[protocol]() if protocol in _OPTIONS else {}
        store, name = fsspec.core.url_to_fs(url, **options)
        if protocol in _EXTRA_OF_PROTOCOL:
            store.retries = 1  # `_with_retries` retries
    except ImportError as error:
        extra = _EXTRA_OF_PROTOCOL.get(protocol)
        install = f"pip install libai_data[{extra}]" if extra else "install what the message names"
        raise ConfigError(f"{url} cannot be read: {error}; {install}") from error
    except ValueError as error:
        raise ConfigError(f"{url} cannot be read: {error}") from error
    return store, name


def _http_options() -> dict[str, Any]:
    """Time out only if the server sends nothing; by default, fsspec gives up after five minutes in total."""
    aiohttp = installed("aiohttp", "reading files by http", "libai_data[remote]")
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SECONDS_OF_SILENCE, sock_read=_SECONDS_OF_SILENCE)
    return {"client_kwargs": {"timeout": timeout}}


def _s3_options() -> dict[str, Any]:
    """Only one try in botocore: by default, botocore and s3fs each try five times, half an hour for a silent store."""
    import fsspec

    patience = {"connect_timeout": _SECONDS_OF_SILENCE, "read_timeout": _SECONDS_OF_SILENCE}
    own = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
    return {"config_kwargs": {"retries": {"total_max_attempts": 1}, **patience, **own}}


_OPTIONS = {"http": _http_options, "https": _http_options, "s3": _s3_options, "s3a": _s3_options}


def _is_folder(url: str, info: dict[str, Any]) -> bool:
    """Whether a store describes a folder. Web servers redirect to its address with "/", a page that lists its files."""
    is_listed = info.get("mimetype") == "text/html" and unquote(str(info.get("url"))) == unquote(f"{url}/")
    return is_listed or info.get("type") == "directory"


def _described(url: str, info: dict[str, Any]) -> RemoteFile:
    if _is_folder(url, info):
        raise ConfigError(f"{url} is a folder, but a file is expected")
    md5, sure = _reported_md5(_protocol_of(url), info)
    version = {key: str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None}
    return RemoteFile(url, info.get("size"), md5, sure, key_of(info.get("size"), sorted(version.items())))


def _reported_md5(protocol: str, info: dict[str, Any]) -> tuple[str | None, bool]:
    for key in ("md5Hash", "Content-MD5"):
        if info.get(key):
            try:
                found = base64.b64decode(info[key], validate=True)
            except (binascii.Error, ValueError):
                continue
            if len(found) == hashlib.md5().digest_size:
                return found.hex(), True
    tag = str(info.get("ETag", "")).strip('"')
    # The tag of a multipart object is no MD5 digest: it ends with "-" and the number of parts.
    if protocol in ("s3", "s3a") and re.fullmatch(r"[0-9a-f]{32}", tag):
        return tag, False
    return None, False


def _with_retries(url: str, what: str, act: Callable[[Any, str], _Result], attempts: int) -> _Result:
    """Call `act`, and retry after a wait if the failure may be temporary.

    The wait doubles with each attempt. It is drawn from its upper half, so that many readers do not retry at once.
    """
    drawn = random.Random(os.urandom(8))  # does not change the random generators of samples
    for attempt in range(1, attempts + 1):
        try:
            return act(*_store_of(url))
        except (ConfigError, _Changed):
            raise
        except Exception as error:  # each store has its own exception classes
            _forget_connections(url)
            _raise_if_permanent(url, what, error)
            if attempt == attempts:
                times = "once" if attempts == 1 else f"in {attempts} attempts"
                raise StorageError(f"{url} could not be {what} {times}; the last error: {_in_words(error)}") from error
            wait = min(_FIRST_WAIT * 2 ** (attempt - 1), _LONGEST_WAIT) * drawn.uniform(0.5, 1)
            logger.warning(
                "%s could not be %s (%s); attempt %d of %d in %.1f s.",
                *(url, what, _in_words(error), attempt + 1, attempts, wait),
            )
            time.sleep(wait)
    raise ConfigError(f"{url} cannot be {what} in {attempts} attempts; set at least 1")


def _forget_connections(url: str) -> None:
    """Let the next attempt look for credentials again: a store that found none when it was made never would."""
    import fsspec

    fsspec.get_filesystem_class(_protocol_of(url)).clear_instance_cache()


def _raise_if_permanent(url: str, what: str, error: Exception) -> None:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        raise StorageError(
            f"{url} cannot be {what}: {error}; make room on the disk, or set LIBAI_DATA_CACHE_DIR to another folder"
        ) from error
    # fsspec's http raises FileNotFoundError for any failure; the exception's cause is the actual failure.
    status = getattr(error.__cause__, "status", None)
    passing = _is_http(url) and error.__cause__ is not None and status not in _PERMANENT
    if status in _DENIED or (isinstance(error, PermissionError) and not passing):
        cause = error.__cause__ if status in _DENIED else error
        raise ConfigError(f"{url} cannot be {what}: access is denied ({cause}); check the credentials") from cause
    if isinstance(error, _ABSENT) and not passing:
        raise ConfigError(f"there is no {url}") from error


def _in_words(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ is not None else error
    return f"{type(cause).__name__}: {cause}".rstrip(": ")
