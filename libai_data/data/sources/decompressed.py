"""Files compressed with zstd, which are decompressed into the cache of this node."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path
from typing import Any, Callable

from libai_data.atomic_files import PathLike
from libai_data.data.files.identity import digest_of_file, file_identity, key_of
from libai_data.data.sources.arrow_columns import import_pyarrow
from libai_data.data.sources.remote import is_remote, look_up
from libai_data.data.sources.shard_index import DescribedShard
from libai_data.data.sources.storage import LocalFile, Storage
from libai_data.errors import FormatError, StorageError

_AT_ONCE = 1 << 20


class DecompressedFile(LocalFile):
    """The decompressed content of a file: a copy in the node's cache, shared and bounded like all other copies.

    Args:
        source, storage, identity: as for `LocalFile`.
        shard: the description of the decompressed file: its size and digests. Unknown algorithms are skipped.
        on_fetch: called after the file was decompressed, because the cache did not have the copy.

    Raises:
        ConfigError, StorageError: As for `LocalFile`; or pyarrow is not installed.
        FormatError: The file is not compressed by zstd, cannot be decompressed, or the result has another size or
            digest.
    """

    def __init__(
        self,
        source: PathLike,
        shard: DescribedShard,
        storage: Storage | None = None,
        identity: str = "",
        on_fetch: Callable[[], None] = lambda: None,
    ) -> None:
        if shard.compression != "zstd":
            method = shard.compression or "an unknown method"
            raise FormatError(
                f"{source} is compressed by {method}; shards that are raw, or compressed by zstd, are read"
            )
        import_pyarrow("a file that is compressed by zstd")
        self.source, self._shard, self._storage = str(source), shard, storage
        kept = storage or Storage.from_environment()
        version = ""
        if is_remote(self.source):
            version = look_up(self.source, kept.attempts).identity
            found = zstd_key(self.source, version, shard.size)
        else:
            local = LocalFile(self.source)
            self.source = local.source
            found = key_of("zstd", file_identity(local.path), shard.size)
        self.identity = self._checked(found, identity)

        def make(part: Path) -> None:
            with LocalFile(self.source, storage, version) as packed:
                _decompress(self.source, packed.path, part)
            self._check(part)
            on_fetch()

        self._hold(kept, self.identity, None if shard.slack else shard.size, make, ".zstd")

    def _check(self, part: Path) -> None:
        size, shard = part.stat().st_size, self._shard
        if size - shard.size not in (0, shard.slack):
            raise FormatError(f"{self.source} has {size} bytes when decompressed; there should be {shard.size}")
        for name, expected in shard.digests.items():
            if name in hashlib.algorithms_guaranteed:
                found = digest_of_file(part, hashlib.new(name))
                if found != expected:
                    raise FormatError(f"{self.source}, decompressed, has the {name} {found}; it should be {expected}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.source, self._shard, self._storage, self.identity)


def zstd_key(address: str, version: str, size: int) -> str:
    """The identity of a decompressed copy, of so many bytes, of the object with this `RemoteFile.identity`."""
    return key_of("zstd", address, version, size)


def _decompress(source: str, packed: Path, target: Path) -> None:
    import pyarrow

    try:
        with pyarrow.OSFile(str(packed)) as file, target.open("wb") as out:
            stream = pyarrow.CompressedInputStream(file, "zstd")
            while block := stream.read(_AT_ONCE):
                out.write(block)
    except (OSError, pyarrow.ArrowException) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(
                f"{source} cannot be decompressed: {error}; make room on the disk, or set LIBAI_DATA_CACHE_DIR to "
                "another folder"
            ) from error
        raise FormatError(f"{source} is not a zstd file, or it is cut short: {error}") from error
