"""Records of shards that are copied to this machine when they are needed, and removed when others need their room."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Callable

import numpy as np

from libai_data.data.cached_property import cached_property
from libai_data.data.datasets.fingerprint import hash_of
from libai_data.data.files.identity import key_of
from libai_data.data.sources.arrow_columns import FileColumns
from libai_data.data.sources.decompressed import DecompressedFile, zstd_key
from libai_data.data.sources.file_formats import warn_of_partitions
from libai_data.data.sources.last_used import LastUsed
from libai_data.data.sources.local_cache import NO_ROOM, LocalCache
from libai_data.data.sources.mapped_file import MappedFile
from libai_data.data.sources.remote import RemoteFile, fetch
from libai_data.data.sources.shard_counts import check_address, checked_format, counted, parted, selected
from libai_data.data.sources.shard_index import DESCRIBED, DescribedShard, described_shards, is_raw
from libai_data.data.sources.shard_table import TABLE, ShardTable
from libai_data.data.sources.sharded import Records
from libai_data.data.sources.storage import LocalFile, Storage
from libai_data.errors import ConfigError, FormatError, StorageError

logger = logging.getLogger(__name__)

_WAITS = (0.1, 0.5, 2.0, 8.0)
"""Seconds between attempts to find room in the cache, while others use all of it."""
_OPENED_AT_MOST = 3
_OF_ARROW = ("parquet", "arrow")
_OF_COLUMNS = (*_OF_ARROW, "mds", "litdata")


class StreamedSource(Records):
    """The records of shards in a store, in the order of their names.

    Opening reads the table of `libai-data index`, or counts samples without reading the shards: by the manifest of
    `libai-data convert`, the index of MDS or LitData, or the footers of Parquet files. A shard is fetched into the
    cache of the node (see `Storage`) when one of its records is read. If the dataset of a loader is this source, or has
    it as `source`, the loader fetches shards ahead.

    Args:
        address: of a folder, or a glob of shards ("**" for any depth).
        sources: format -> the source of a file.
        format, columns: as for `open_source`.

    Attributes:
        shard_lengths, identity: as for `ShardedSource`.
        opened: the shards that are open; sources of one dataset share it (`StreamedShards`).

    Raises:
        ConfigError: There are no shards, they cannot be streamed, or the cache is smaller than a shard.
        FormatError: The table, manifest, index or a footer is damaged.
        StorageError: The store does not answer.
    """

    def __init__(
        self,
        address: str,
        sources: Mapping[str, Callable[..., Any]],
        format: str = "",
        columns: Sequence[str] | None = None,
    ) -> None:
        self.folder, self._pattern = parted(address)
        self._columns = columns
        self.storage = Storage.from_environment()
        self.table = self._table(format)
        self._open_file = partial(sources[self.table.format], **options_for(self.table.format, columns))
        self._compared = FileColumns(columns)
        if self.table.format == "parquet" and len(self.table.names):
            warn_of_partitions(f"{self.folder}/{self.table.names[0]}")
        self.shard_lengths = self.table.samples
        self._ends = np.cumsum(self.shard_lengths)
        self.identity = key_of("streamed", self.folder, self.table.identity, columns)
        self._cache = LocalCache(self.storage.directory, self.storage.size)
        self.opened = LastUsed(self.storage.size // 4)
        self._asked = 0.0
        largest = int(self.table.sizes.max(initial=0))
        if largest > self.storage.size:
            raise ConfigError(
                f"{self.folder} has a shard of {largest} bytes, and the cache {self.storage.directory} has "
                f"{self.storage.size}; set LIBAI_DATA_CACHE_SIZE to at least {2 * largest} bytes"
            )

    def _table(self, format: str) -> ShardTable:
        if format:
            checked_format(self.folder, format)
        check_address(self.folder)
        try:
            table = ShardTable.read(self.folder)
        except ConfigError:  # There is no table.
            return counted(self.folder, format, pattern=self._pattern, columns=self._columns)
        if format and table.format != format:
            raise ConfigError(f"{self.folder}/{TABLE} is of shards of the format {table.format!r}, not {format!r}")
        checked_format(self.folder, table.format)
        return selected(self.folder, table, self._pattern)

    @property
    def _what(self) -> str:
        return f"records of {self.folder}"

    @cached_property  # A loader sees changes of other attributes, and then starts its workers again.
    def fetched(self) -> set[int]:
        """The shards that this process has fetched, and that its log does not count yet."""
        return set()

    def rows_of(self, number: int, rows: np.ndarray) -> list[Any]:
        shard = self.opened.get((self.identity, number))
        if shard is None:
            size = int(self.table.sizes[number])
            shard = self.opened.opened((self.identity, number), size, lambda: self._opened(number))
        return shard.rows_of(0, rows)

    def _opened(self, number: int) -> Any:
        remote = self.table.remote(self.folder, number)
        for _ in range(_OPENED_AT_MOST):
            try:
                file = MappedFile(remote.url, self.hold(number))
                file.map()
                # The index lists all shards, so it is read once, not for each shard.
                options = {"described": self._described} if self.table.format in DESCRIBED else {}
                opened = self._open_file(file, **options)
                break
            except FileNotFoundError:
                logger.warning(
                    "The copy of %s is missing from %s; it is fetched again.", remote.url, self.storage.directory
                )
        else:
            raise StorageError(
                f"{remote.url} cannot be kept in {self.storage.directory}: something deletes files there"
            )
        if len(opened) != self.shard_lengths[number]:
            raise FormatError(
                f"{remote.url} has {len(opened)} records, but {self.shard_lengths[number]} were counted; run "
                f"'libai-data index {self.folder}' again"
            )
        if self.table.format in _OF_ARROW and opened.schema is not None:
            self._compared.chosen(remote.url, opened.schema, len(opened))
        return opened

    def hold(self, number: int) -> Copy | DecompressedFile:
        """The copy of a shard, which the cache keeps until the copy is closed; fetched if the cache does not have it. A
        ConfigError or StorageError as of `LocalFile`, or if the shard has changed."""
        remote = self.table.remote(self.folder, number)

        def on_fetch() -> None:
            self.fetched.add(number)

        for wait in (*_WAITS, None):
            try:
                if self._is_packed(remote.url):
                    shard = self._described[remote.url]
                    identity = zstd_key(remote.url, remote.identity, shard.size)
                    return DecompressedFile(remote.url, shard, self.storage, identity, on_fetch)
                return Copy(remote, self.storage, self.folder, on_fetch)
            except StorageError as error:
                if NO_ROOM not in str(error):
                    raise
                if wait is None:
                    raise StorageError(f"{remote.url} cannot be kept on this machine: {error}") from error
                # This process can open its shards again. Others close theirs as they read on, or when asked.
            self.opened.clear()
            self._cache.ask_for_room()
            time.sleep(wait)
        raise AssertionError

    def close_if_asked(self) -> None:
        """Close the open shards if a process has found no room in the cache since the last call."""
        before, self._asked = self._asked, self._cache.asked()
        if self._asked != before:
            self.opened.clear()

    def _is_packed(self, url: str) -> bool:
        return self.table.format in DESCRIBED and not is_raw(url)

    @cached_property
    def _described(self) -> dict[str, DescribedShard]:
        files = [f"{self.folder}/{name}" for name in self.table.names]
        return described_shards(files, self.table.format, self._columns)

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint stores to identify the data: the number of shards, and a hash of their names, sizes and
        numbers of samples, in their order."""
        columns = (*self.table.names.numbers(), self.table.sizes, self.table.samples)
        return {"shards": len(self.table), "names": hash_of(b"".join(column.tobytes() for column in columns))}

    def _key(self, remote: RemoteFile) -> str:
        if self._is_packed(remote.url):
            return zstd_key(remote.url, remote.identity, remote.size or 0)
        return key_of(remote.url, remote.identity)

    def expect(self, number: int, when: int) -> None:
        """Close a shard, and note when it is needed again; see `LocalCache.expect`."""
        self.opened.forget((self.identity, number))
        self._cache.expect(self._key(self.table.remote(self.folder, number)), when)


def options_for(format: str, columns: Any) -> dict[str, Any]:
    """The arguments by which a source of a format reads only these columns; none for all columns."""
    if columns is None:
        return {}
    if format not in _OF_COLUMNS:
        raise ConfigError(f"the format {format!r} has no columns to choose; leave out `columns`, or use {_OF_COLUMNS}")
    return {"columns": columns}


class Copy(LocalFile):
    """The copy of a shard in the cache; `on_fetch` is called if the shard had to be fetched."""

    def __init__(self, remote: RemoteFile, storage: Storage, folder: str, on_fetch: Callable[[], None]) -> None:
        self.source, self.identity = remote.url, remote.identity
        changed = (
            f"since its samples were counted; open the data again, or, if the folder has a {TABLE}, run 'libai-data "
            f"index {folder}' again"
        )

        def make(part: Path) -> None:
            fetch(remote, part, storage.attempts, changed)
            on_fetch()

        self._hold(storage, key_of(remote.url, remote.identity), remote.size, make)
