"""Counts the samples of the shards of a store: by files beside them, by their footers, or by reading them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np

from libai_data.data.json_text import parsed_json
from libai_data.data.sources.file_formats import check_no_table, format_of_files
from libai_data.data.sources.local_cache import NO_ROOM
from libai_data.data.sources.manifest import MANIFEST, check_size, parsed_manifest, places_of
from libai_data.data.sources.packed_names import PackedNames
from libai_data.data.sources.remote import RemoteFile, list_files, look_up
from libai_data.data.sources.remote_counts import count_by_ranges
from libai_data.data.sources.shard_index import DESCRIBED, described_shards, is_raw
from libai_data.data.sources.shard_table import TABLE, ShardTable, packed_digits
from libai_data.data.sources.storage import LocalFile, Storage
from libai_data.errors import ConfigError, FormatError, StorageError

STREAMED = ("array_record", "webdataset", "parquet", "mds", "litdata", "arrow", "jsonl", "numpy")
"""Formats of which each shard can be read by itself."""
AT_ONCE = 16
_MOST_SAMPLES = 1 << 40
_SIGNS = "*?["
_INDEX = "index.json"
_Known = dict[str, tuple[int, Optional[int]]]
"""Address -> number of samples, and bytes (None if not known), as files beside the shards list them."""


def counted(
    folder: str,
    format: str = "",
    open_copy: Callable[[str, str], Any] | None = None,
    at_once: int = AT_ONCE,
    on_counted: Callable[[int], object] = lambda total: None,
    pattern: str = "",
    columns: Sequence[str] | None = None,
) -> ShardTable:
    """Count the samples of the shards below a folder.

    Args:
        folder: address, without a slash at its end.
        format: of the shards; by default from the endings of their names.
        open_copy: address and format -> source, to count samples by reading; by default this is an error.
        at_once: number of parallel requests.
        on_counted: called after each shard, with the number of all shards.
        pattern: glob that the names of shards match, from the folder on; "" for all.
        columns: as for `described_shards`.

    Raises:
        ConfigError: The folder is none of a store, or has no shards that can be streamed or counted.
        FormatError: The files beside the shards do not fit the shards.
        StorageError: The store does not answer.
    """
    attempts = Storage.from_environment().attempts
    check_address(folder)
    found = list_files(f"{folder}/", attempts)
    other = next((path for path in found if not path.startswith(f"{folder}/")), "")
    if other:
        raise ConfigError(
            f"{folder} is not a folder of shards: the store has {other}; give the address of their folder"
        )
    check_no_table(folder, found)
    files = [path for path in found if not path.endswith(".json") and _matches(path[len(folder) + 1 :], pattern)]
    if not files:
        raise no_shards(folder, pattern)
    kind = checked_format(folder, format or format_of_files(folder, files, STREAMED))
    known = _of_described(found, kind, columns) if kind in DESCRIBED else _of_manifest(folder, [] if pattern else files)
    if kind == "webdataset" and not known and f"{folder}/{_INDEX}" in found:
        known = _of_index(folder)
    if kind in DESCRIBED:
        files = [path for path in files if path in known] if pattern else list(known)

    def count(path: str) -> tuple[int, RemoteFile]:
        remote = look_up(path, attempts)
        if remote.size is None:
            raise ConfigError(
                f"{path} cannot be streamed: the store does not report its size; open it without streaming"
            )
        if kind in DESCRIBED and not is_raw(path):
            remote = replace(remote, size=known[path][1])  # of the copy, which is decompressed
        samples = _samples(folder, kind, remote, known, open_copy, attempts)
        on_counted(len(files))
        return samples, remote

    with ThreadPoolExecutor(at_once) as pool:
        rows = list(pool.map(count, files))
    remotes = [remote for _, remote in rows]
    return ShardTable(
        kind,
        PackedNames.of(path[len(folder) + 1 :] for path in files),
        np.array([samples for samples, _ in rows], np.int64),
        np.array([remote.size for remote in remotes], np.int64),
        packed_digits(np.array([remote.identity for remote in remotes], "S24")),
        packed_digits(np.array([remote.md5 or "" for remote in remotes], "S32")),
        np.array([remote.md5_is_sure for remote in remotes], np.uint8),
    )


def checked_format(folder: str, format: str) -> str:
    """The format; a ConfigError if shards of this format cannot be streamed."""
    if format not in STREAMED:
        raise ConfigError(
            f"{folder} cannot be streamed: its format is {format!r}, and only these can be streamed: {list(STREAMED)}; "
            "open it without streaming, or write it in one of these with 'libai-data convert'"
        )
    return format


def check_address(folder: str) -> None:
    """Raise a ConfigError for a path of this machine, or a glob."""
    if "://" not in folder:
        raise ConfigError(
            f"{folder} is on this machine, where streaming is not needed; open it without streaming, or give "
            f"file://{os.path.abspath(folder)} to copy shards from a slow shared file system when they are needed"
        )
    if any(sign in folder for sign in _SIGNS):
        raise ConfigError(f"{folder} is a glob, but the address of one folder of shards is needed")


def parted(address: str) -> tuple[str, str]:
    """Split an address into a folder, and a glob of the shards in the folder; "" if the address has no glob."""
    parts = address.rstrip("/").split("/")
    first = next((number for number, part in enumerate(parts) if any(sign in part for sign in _SIGNS)), len(parts))
    return "/".join(parts[:first]), "/".join(parts[first:])


def selected(folder: str, table: ShardTable, pattern: str) -> ShardTable:
    """The shards of a table whose names match a glob; a ConfigError if none does."""
    if not pattern:
        return table
    kept = np.flatnonzero([_matches(name, pattern) for name in table.names])
    if not len(kept):
        raise no_shards(folder, pattern)
    if table.format in DESCRIBED:  # Only a whole folder has the order of its index.
        kept = kept[np.argsort(table.names.many(kept))]
    return table.part(kept)


def no_shards(folder: str, pattern: str) -> ConfigError:
    """The error for a folder without shards."""
    of_what = f" that match {pattern!r}" if pattern else ""
    return ConfigError(f"{folder} has no shards{of_what}; give the address of a folder of shards, or a glob of them")


def _matches(name: str, pattern: str) -> bool:
    return not pattern or re.match(_as_expression(pattern), name) is not None


@lru_cache(maxsize=8)
def _as_expression(pattern: str) -> str:
    from fsspec.utils import glob_translate

    return str(glob_translate(pattern))


def _samples(
    folder: str,
    kind: str,
    remote: RemoteFile,
    known: _Known,
    open_copy: Callable[[str, str], Any] | None,
    attempts: int,
) -> int:
    if remote.url in known:
        samples, size = known[remote.url]
        check_size(remote.url, remote.size, size)
        if not 0 <= samples <= _MOST_SAMPLES:
            raise FormatError(
                f"{remote.url} has {samples} samples according to the table or manifest beside it, which is not "
                "possible; remove the table or manifest"
            )
        return samples
    why = ""
    try:
        count = count_by_ranges(kind, remote, attempts)
        if count is not None:
            return count
    except StorageError as error:
        why = f" ({error})"
    if open_copy is None:
        raise ConfigError(
            f"the number of samples of {remote.url} is not known{why}; run 'libai-data index {folder}' once: it counts "
            f"them and writes {TABLE} beside the shards"
        )
    try:
        return len(open_copy(remote.url, kind))
    except StorageError as error:
        if NO_ROOM not in str(error):
            raise
        raise StorageError(f"{remote.url} cannot be counted: {error}, or count fewer shards at once") from error


def _of_described(files: Sequence[str], kind: str, columns: Sequence[str] | None) -> _Known:
    """The shards that indices describe, in the order of `described_shards`."""
    return {
        path: (shard.samples, None if shard.slack and is_raw(path) else shard.size)
        for path, shard in described_shards(files, kind, columns).items()
    }


def _of_manifest(folder: str, files: Sequence[str]) -> _Known:
    """The shards in the manifest of `libai-data convert`, all of which must be in `files` unless it is empty; none
    without a manifest."""
    path = f"{folder}/{MANIFEST}"
    content = _content(path)
    shards = {} if content is None else parsed_manifest(path, content).shards
    places = places_of(folder, shards, files or [f"{folder}/{name}" for name in shards])
    return {place: (shards[name]["records"], shards[name]["size"]) for name, place in places.items()}


def _of_index(folder: str) -> _Known:
    """The shards in the index of WebDataset (wids)."""
    path = f"{folder}/{_INDEX}"
    content = _content(path)
    if content is None:
        return {}
    try:
        shards = parsed_json(content)["shardlist"]
        return {f"{folder}/{each['url']}": (int(each["nsamples"]), each.get("filesize")) for each in shards}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise FormatError(f"{path} is no index of WebDataset shards ({error!r}); remove it") from error


def _content(path: str) -> bytes | None:
    """The bytes of a file beside the shards; None if there is no such file."""
    try:
        with LocalFile(path) as file:
            return Path(file.path).read_bytes()
    except ConfigError:
        return None
