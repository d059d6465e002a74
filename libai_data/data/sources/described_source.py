"""Samples of shards that an `index.json` describes, by index.

A shard begins with the number of its samples and the start of each sample. Then the samples follow. A sample has the
sizes of its values without a fixed size, and then all values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable

import numpy as np

from libai_data.data.cached_property import cached_property
from libai_data.data.files.identity import key_of
from libai_data.data.sources.column_names import chosen_columns
from libai_data.data.sources.decompressed import DecompressedFile
from libai_data.data.sources.mapped_file import MappedFile
from libai_data.data.sources.shard_index import INDEX, DescribedShard, described_shards
from libai_data.data.sources.sharded import Paths, Shard, ShardedSource
from libai_data.data.sources.storage import listed
from libai_data.errors import FormatError
from libai_data.errors.argument_rules import check_types

Decode = Callable[[bytes], Any]


class DescribedSource(ShardedSource):
    """The samples of shards, as dicts with a value for each column; see the subclasses.

    Args:
        paths: folders with an `index.json`, or shards in such a folder; see `storage.listed`.
        columns: names of the columns to read; by default all.
        described: path -> description of a shard, if the index has been read; only for a single open shard.
    """

    _format: str
    """A name of `shard_index.DESCRIBED`."""
    _shard_class: type[SampleShard]

    def __init__(
        self,
        paths: Paths | MappedFile,
        columns: Sequence[str] | None = None,
        described: Mapping[str, DescribedShard] | None = None,
    ) -> None:
        check_types(DescribedSource, {"columns": columns})
        if isinstance(paths, MappedFile):
            found, files = [(described or described_shards([paths.source], self._format))[paths.source]], [paths]
        else:
            by_path = described_shards(listed(paths), self._format, columns)
            found = [*by_path.values()]
            packed = [path for path, shard in by_path.items() if shard.packed and path.endswith(shard.packed)]
            copies = {path: DecompressedFile(path, by_path[path]) for path in packed}
            files = [MappedFile(path, copies.get(path)) for path in by_path]
        shards = [self._shard(file, shard, columns) for file, shard in zip(files, found)]
        # The index may change without the shards, for example if a column is renamed.
        described_columns = key_of([shard.columns for shard in found])
        super().__init__(files, shards, [columns and list(columns), described_columns])

    def _shard(self, file: MappedFile, described: DescribedShard, columns: Sequence[str] | None) -> Shard:
        return self._shard_class(file, described, columns)


class SampleShard:
    """The samples of a shard that its index describes; `columns` are as for `DescribedSource`."""

    _decoder_of: Callable[[str, str], Decode]
    """Returns the decoder for an encoding; the second argument names the column in errors."""

    def __init__(self, file: MappedFile, described: DescribedShard, columns: Sequence[str] | None) -> None:
        self._file = file
        self._count, self._columns = described.samples, described.columns
        self._chosen = set(chosen_columns([column.name for column in self._columns], columns, file.source))
        self._head = 4 * sum(column.size == 0 for column in self._columns)
        self._is_checked = False
        # An unknown encoding is refused now, not at the first read.
        _ = self._decoders
        if file.size - described.size not in (0, described.slack):
            raise FormatError(
                f"{file.source} has {file.size} bytes, where its index says {described.size}: it is cut short"
            )
        if file.size < 4 * self._count + 8:
            raise FormatError(
                f"{file.source} has {file.size} bytes, too few for the {self._count} samples of its index"
            )

    def __len__(self) -> int:
        return self._count

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The samples of these rows, in this order."""
        starts = self._starts()
        return [self._sample(row, int(starts[row]), int(starts[row + 1])) for row in rows]

    def _starts(self) -> np.ndarray:
        """The starts in `_table`, which are checked before their first use."""
        if not self._is_checked:
            self._check()
            self._is_checked = True
        return self._table()

    def _table(self) -> np.ndarray:
        """The start of each sample, and the end of the last one, uint32 [samples + 1]."""
        return self._file.array[4 : 4 * self._count + 8].view("<u4")

    def _check(self) -> None:
        count = int.from_bytes(self._file.bytes[:4], "little")
        if count != self._count:
            raise FormatError(
                f"{self._file.source}, offset 0: it has {count} samples, where its index says {self._count}"
            )
        starts = self._table()
        if starts[-1] != self._file.size or (starts[1:] < starts[:-1]).any() or starts[0] < 4 * self._count + 8:
            raise FormatError(f"{self._file.source}, offset 4: the places of its samples do not ascend to its end")

    def _sample(self, row: int, start: int, stop: int) -> dict[str, Any]:
        sample: dict[str, Any] = {}
        head, place, name = 0, self._head, ""
        try:
            content = self._content(row, start, stop)
            for (name, _, size), decode in zip(self._columns, self._decoders):
                if size is None:
                    size = len(content)
                elif not size:
                    size = int.from_bytes(content[head : head + 4], "little")
                    head += 4
                if place + size > len(content):
                    raise ValueError(f"{size} bytes should follow")
                if decode is not None:
                    sample[name] = decode(content[place : place + size])
                place += size
            if place != len(content):
                raise ValueError(f"{len(content) - place} bytes are left")
        except Exception as error:  # decoders of JSON, text, numbers and images raise many kinds of errors
            what = f"column {name!r}" if name else "it"
            raise FormatError(
                f"{self._file.source}, record {row}, offset {start}: {what} cannot be read: {error}"
            ) from error
        return sample

    def _content(self, row: int, start: int, stop: int) -> bytes:
        """The bytes of a sample."""
        return self._file.bytes[start:stop]

    @cached_property
    def _decoders(self) -> list[Decode | None]:
        return [
            self._decoder_of(encoding, f"column {name!r} of {self._file.source}, by its {INDEX},")
            if name in self._chosen
            else None
            for name, encoding, _ in self._columns
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_decoders"}
