"""Samples of MDS shards, the format of MosaicML Streaming, by index.

Format: github.com/mosaicml/streaming, `streaming/base/format/mds`. A file `index.json` lists the shards of a folder,
with the number of samples and the columns of each. A shard has the number of its samples, where each begins, and a copy
of its columns; then come the samples: the sizes of the values that have no fixed one, and all values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple

import numpy as np

from libai_data.data.sources.arrow_columns import chosen_columns
from libai_data.data.sources.decompressed import DecompressedFile, zstd_key
from libai_data.data.sources.mapped_file import MappedFile
from libai_data.data.sources.mds_values import Decode, decoder_of
from libai_data.data.sources.sharded import Paths, ShardedSource
from libai_data.data.sources.storage import LocalFile, Storage, listed
from libai_data.errors import ConfigError, FormatError

_INDEX = "index.json"
_ENDING = ".mds"
_VERSION = 2


class MDSSource(ShardedSource):
    """The samples of MDS shards: dicts of a value for each column.

    Numbers, texts, JSON and arrays are Python's and numpy's, encoded images are bytes, and raw images (`pil`) arrays.
    Shards that are compressed by zstd are decompressed into the cache of this node (`storage.LocalFile`), and compared
    with the digests that the index has. Others hold no checksums.

    Args:
        paths: folders with an `index.json`, or shards in such a folder; see `storage.listed`.
        columns: names of those to read; by default all.
        described: path -> what the index says of a shard, if it has been read; only for a single open shard.

    Raises:
        ConfigError: There is no such file or column, or no index of the shards.
        FormatError: A file is cut short or damaged, compressed in another way, or has a column of pickled objects.
    """

    def __init__(
        self,
        paths: Paths | MappedFile,
        columns: Sequence[str] | None = None,
        described: Mapping[str, DescribedShard] | None = None,
    ) -> None:
        if isinstance(paths, MappedFile):
            found, files = [(described or described_shards([paths.source]))[paths.source]], [paths]
        else:
            by_path = described_shards(listed(paths))
            found = [*by_path.values()]
            files = [
                MappedFile(path, decompressed(path, shard) if shard.is_packed(path) else None)
                for path, shard in by_path.items()
            ]
        shards = [_Shard(file, shard, columns) for file, shard in zip(files, found)]
        super().__init__(files, shards, None if columns is None else list(columns))


class _Column(NamedTuple):
    """A column: its encoding, and the bytes of a value, 0 if they differ."""

    name: str
    encoding: str
    size: int


class DescribedShard(NamedTuple):
    """What an index says of a shard.

    Args:
        name: of the file, from the folder of the index.
        size: of the file, in bytes.
        digests: algorithm -> hexadecimal digest of the file.
        packed: name of the compressed file; "" if there is none.
        compression: of the compressed file.
        samples: number of samples.
        columns: in the order of their values.
    """

    name: str
    size: int
    digests: Mapping[str, str]
    packed: str
    compression: str
    samples: int
    columns: tuple[_Column, ...]

    def is_packed(self, path: str) -> bool:
        """Whether a file is the compressed one."""
        return bool(self.packed) and path.endswith(self.packed)

    @classmethod
    def from_json(cls, shard: Any) -> DescribedShard:
        """Read an entry of an index; what is malformed raises a KeyError, TypeError or ValueError."""
        if (shard["format"], shard["version"]) != ("mds", _VERSION):
            raise ValueError(f"a shard has the format {shard['format']!r}, version {shard['version']}; MDS 2 is read")
        raw, packed = shard["raw_data"], shard.get("zip_data") or {"basename": ""}
        for name in (raw["basename"], packed["basename"]):
            if name.startswith("/") or ".." in name.split("/"):
                raise ValueError(f"the name {name!r} leads out of its folder")
        names, encodings, sizes = (shard[f"column_{what}"] for what in ("names", "encodings", "sizes"))
        if not len(names) == len(encodings) == len(sizes):
            raise ValueError(f"there are {len(names)} names of columns, but not as many encodings and sizes")
        if not all(isinstance(text, str) for text in (*names, *encodings)):
            raise TypeError("the name or encoding of a column is no text")
        columns = tuple(
            _Column(name, encoding, int(size or 0)) for name, encoding, size in zip(names, encodings, sizes)
        )
        samples = int(shard["samples"])
        if samples < 0 or any(column.size < 0 for column in columns):
            raise ValueError("a number of samples or bytes is below 0")
        digests, compression = dict(raw.get("hashes") or {}), str(shard.get("compression") or "").partition(":")[0]
        return cls(raw["basename"], int(raw["bytes"]), digests, packed["basename"], compression, samples, columns)


class _Shard:
    def __init__(self, file: MappedFile, described: DescribedShard, columns: Sequence[str] | None) -> None:
        self._file = file
        self._count, self._columns = described.samples, described.columns
        self._chosen = set(chosen_columns([column.name for column in self._columns], columns, file.source))
        self._head = 4 * sum(not column.size for column in self._columns)
        self._is_checked = False
        self._decoders: list[Decode | None] = self._made_decoders()
        if file.size != described.size:
            raise FormatError(
                f"{file.source} has {file.size} bytes, where its index says {described.size}: it is cut short"
            )

    def __len__(self) -> int:
        return self._count

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The samples of these rows, in this order."""
        starts = self._starts()
        return [self._sample(row, int(starts[row]), int(starts[row + 1])) for row in rows]

    def _starts(self) -> np.ndarray:
        """Where each sample begins, and the last one ends."""
        end = 4 * self._count + 8
        if not self._is_checked:
            count = int.from_bytes(self._file.bytes[:4], "little")
            if count != self._count or end > self._file.size:
                raise FormatError(
                    f"{self._file.source}, offset 0: it has {count} samples, where its index says {self._count}"
                )
        starts = self._file.array[4:end].view("<u4")
        if not self._is_checked:
            if starts[-1] != self._file.size or (starts[1:] < starts[:-1]).any() or starts[0] < end:
                raise FormatError(f"{self._file.source}, offset 4: the places of its samples do not ascend to its end")
            self._is_checked = True
        return starts

    def _sample(self, row: int, start: int, stop: int) -> dict[str, Any]:
        content = self._file.bytes[start:stop]
        sample: dict[str, Any] = {}
        head, place, name = 0, self._head, ""
        try:
            for (name, _, size), decode in zip(self._columns, self._decoders):
                if not size:
                    size = int.from_bytes(content[head : head + 4], "little")
                    head += 4
                if place + size > len(content):
                    raise ValueError(f"{size} bytes should follow")
                if decode is not None:
                    sample[name] = decode(content[place : place + size])
                place += size
            if place != len(content):
                raise ValueError(f"{len(content) - place} bytes are left")
        except Exception as error:  # decoders of JSON, text, numbers and images raise of many kinds
            raise FormatError(
                f"{self._file.source}, record {row}, offset {start}: column {name!r} cannot be read: {error}"
            ) from error
        return sample

    def _made_decoders(self) -> list[Decode | None]:
        return [
            decoder_of(encoding, f"column {name!r} of {self._file.source}, by its {_INDEX},")
            if name in self._chosen
            else None
            for name, encoding, _ in self._columns
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_decoders": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._decoders = self._made_decoders()


def described_shards(files: Sequence[str]) -> dict[str, DescribedShard]:
    """Path -> what the index says of a shard, in the order of the files."""
    given = [path for path in files if path.rpartition("/")[2] == _INDEX]
    indices = given or sorted({_beside(path, _INDEX) for path in files})
    known: dict[str, DescribedShard] = {}
    there, claimed = set(files), set()
    for index in indices:
        for shard in _shards_of(index):
            paths = [_beside(index, name) for name in (shard.name, shard.packed) if name]
            # Whoever keeps compressed files too has both.
            path = next((path for path in paths if path in there), "")
            if not path and given:
                raise ConfigError(f"{index} lists {paths[-1]}, which is not there")
            known.setdefault(path, shard)
            claimed.update(paths)
    unknown = [path for path in files if path not in claimed and _ENDING in path.rpartition("/")[2]]
    if unknown:
        raise ConfigError(f"{unknown[0]} is in no {_INDEX} of {indices}")
    found = {path: known[path] for path in files if path in known}
    if not found:
        raise ConfigError(f"{indices} list none of the files {list(files)[:5]}; give folders of MDS shards")
    return found


def _shards_of(index: str) -> list[DescribedShard]:
    with LocalFile(index) as file:
        content = Path(file.path).read_bytes()
    try:
        return [DescribedShard.from_json(shard) for shard in json.loads(content)["shards"]]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise FormatError(f"{index} is no index of MDS shards: {type(error).__name__}: {error}") from error


def decompressed(
    path: str,
    shard: DescribedShard,
    storage: Storage | None = None,
    version: str = "",
    on_fetch: Callable[[], None] = lambda: None,
) -> DecompressedFile:
    """A compressed shard, as it was before.

    Args:
        path: path or address of the compressed file.
        shard: what the index says of it.
        storage: where copies are kept; by default as the environment sets it.
        version: of an object in a store, which it must still have; by default any.
        on_fetch: called when it was fetched, because the cache did not have it.
    """
    if shard.compression != "zstd":
        method = shard.compression or "an unknown method"
        raise FormatError(f"{path} is compressed by {method}; shards that are raw, or compressed by zstd, are read")
    identity = version and zstd_key(path, version, shard.size)
    return DecompressedFile(path, shard.size, shard.digests, storage, identity, on_fetch)


def _beside(path: str, name: str) -> str:
    folder, slash, _ = path.rpartition("/")
    return f"{folder}{slash}{name}"
