"""Samples of the chunks that LitData writes (`optimize`), by index.

Format of compression in chunks and of Arrow tables: github.com/Lightning-AI/litData, `append_arrow_row_footer` in
`src/litdata/streaming/item_loader.py`, and `src/litdata/streaming/framed_zstd.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from libai_data.data.sources.arrow import ArrowShard
from libai_data.data.sources.arrow_columns import FileColumns, import_pyarrow
from libai_data.data.sources.described_source import DescribedSource, SampleShard
from libai_data.data.sources.last_used import LastUsed
from libai_data.data.sources.litdata_values import decoder_of
from libai_data.data.sources.mapped_file import MappedFile
from libai_data.data.sources.shard_index import DescribedShard
from libai_data.errors import FormatError

_CACHE_BYTES = 256 << 20
_FRAMED, _HEAD = (b"LDFZ01\0\0", 1, 0), struct.Struct("<8s2H3I")
_FRAME = np.dtype([("first", "<u4"), ("samples", "<u4"), ("place", "<u8"), ("packed", "<u4"), ("size", "<u4")])
_TABLE, _TABLE_END = b"LDARW01\0", 12


class LitDataSource(DescribedSource):
    """The samples of LitData's chunks: dicts of a value for each leaf of the sample, in the order of `index.json`.

    A leaf of a nested sample is named `outer.inner`. The leaves of a tuple or list are named "0", "1" and so on. A
    sample that is a single value becomes {"0": value}. Numbers and texts become Python objects. Arrays, tensors and raw
    images (`pil`) become numpy arrays. Encoded values, such as images, sound and video, stay bytes. In chunks for
    `TokensLoader`, a sample is the array of tokens that was yielded at once.

    Chunks that are compressed by zstd are decompressed into the cache of this node (`storage.LocalFile`). If batches of
    samples are compressed, or are rows of Arrow, each process caches the last used batches: 256 MiB for all chunks
    together. Chunks have no checksums.

    Args:
        paths: folders with an `index.json`, or chunks in such a folder; see `storage.listed`.
        columns: names of the leaves to read; by default all.
        described: path -> description of a chunk, if the index has been read; only for a single open chunk.

    Raises:
        ConfigError: There is no such file or column, or no index of the chunks.
        FormatError: A file is cut short, damaged, encrypted or compressed in another way. Or a leaf has pickled
            objects, or a dtype that numpy does not have.
        SchemaError: The leaves that are read differ between the chunks.
    """

    _format = "litdata"
    _kept: LastUsed | None = None

    def _shard(self, file: MappedFile, described: DescribedShard, columns: Sequence[str] | None) -> Chunk:
        self._kept = self._kept or LastUsed(_CACHE_BYTES)
        return _CHUNKS[described.compressed](self._kept, file, described, columns)


class Chunk(SampleShard):
    """The samples of a chunk: plain samples, or the rows of an Arrow table at the end of the chunk. `kept` is the cache
    of the last decompressed or decoded batches of samples."""

    _decoder_of = staticmethod(decoder_of)

    def __init__(self, kept: LastUsed, *args: Any) -> None:
        super().__init__(*args)
        self._kept = kept
        self._rows: ArrowShard | None = None

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The samples of these rows, in this order."""
        if self._rows is None and self._file.bytes[-len(_TABLE) :] == _TABLE:
            import_pyarrow("a chunk of LitData that is a table of Arrow")
            table = ArrowShard(_Table(self._file), FileColumns(None), self._kept)  # type: ignore[arg-type]
            if len(table) != len(self):
                raise FormatError(
                    f"{self._file.source}: its table has {len(table)} rows, where its index says {len(self)}"
                )
            self._rows = table
        return super().read(rows) if self._rows is None else list(map(self._flat, self._rows.read(rows)))

    def _flat(self, row: Mapping[str, Any], outer: str = "") -> dict[str, Any]:
        """The chosen values of a row; the values of a struct are named `outer.inner`."""
        found: dict[str, Any] = {}
        for key, value in row.items():
            name = f"{outer}{key}"
            if name in self._chosen:
                found[name] = value
            elif isinstance(value, dict):
                found.update(self._flat(value, f"{name}."))
        return found


class _Table:
    """The Arrow table at the end of a chunk, with the attributes of a `MappedFile` that `ArrowShard` uses."""

    def __init__(self, file: MappedFile) -> None:
        self._file, self.source = file, file.source
        self.size = int.from_bytes(file.bytes[-_TABLE_END : -len(_TABLE)], "little")
        self._stop = file.size - _TABLE_END
        if self._stop < self.size:
            raise FormatError(f"{self.source} has no place for its table of {self.size} bytes: it is cut short")

    @property
    def array(self) -> np.ndarray:
        return self._file.array[self._stop - self.size : self._stop]

    @property
    def bytes(self) -> memoryview:
        return self.array.data


class ChunkOfPackedSamples(Chunk):
    """A chunk in which each sample is compressed by zstd."""

    def _content(self, row: int, start: int, stop: int) -> bytes:
        return _unpacked(self._file.bytes[start:stop])


class ChunkOfBatches(Chunk):
    """A chunk in which batches of samples are compressed by zstd."""

    def _table(self) -> np.ndarray:
        """The start of each sample in the decompressed batches, and the end of the last one, uint32 [samples + 1]."""
        return self._file.array[_HEAD.size : self._frames_begin].view("<u4")

    @property
    def _frames_begin(self) -> int:
        return _HEAD.size + 4 * (len(self) + 1)

    def _frames(self) -> np.ndarray:
        """The headers of the batches, `_FRAME` [batches]."""
        size = _FRAME.itemsize * _HEAD.unpack(self._file.bytes[: _HEAD.size])[-1]
        return self._file.array[self._frames_begin : self._frames_begin + size].view(_FRAME)

    def _check(self) -> None:
        file, begin = self._file, self._frames_begin
        head = _HEAD.unpack(file.bytes[: _HEAD.size]) if begin <= file.size else (0,)
        if head[:4] != (*_FRAMED, len(self)):
            raise FormatError(f"{file.source}, offset 0: it has no batches of {len(self)} samples, as its index says")
        if begin + _FRAME.itemsize * head[-1] > file.size:
            raise FormatError(f"{file.source}, offset {begin}: the places of its batches are cut short")
        starts, frames = self._table().astype(np.int64), self._frames()
        edges = np.append(frames["first"], len(self)).astype(np.int64)
        ascend = not (starts[0] or edges[0] or (np.diff(starts) < 0).any())
        if (
            not ascend
            or (np.diff(edges) != frames["samples"]).any()
            or (np.diff(starts[edges]) != frames["size"]).any()
        ):
            raise FormatError(f"{file.source}, offset {_HEAD.size}: the places of its samples and batches do not fit")

    def _content(self, row: int, start: int, stop: int) -> bytes:
        frames = self._frames()
        number = int(np.searchsorted(frames["first"], row, side="right")) - 1
        batch = self._kept.made((self._file.source, number), lambda: self._batch(frames[number]))
        first = int(self._starts()[frames["first"][number]])
        return batch[start - first : stop - first]

    def _batch(self, frame: Any) -> tuple[bytes, int]:
        """The decompressed samples of a batch, and their number of bytes."""
        _, _, place, packed, size = frame.tolist()
        batch = _unpacked(self._file.bytes[place : place + packed], size + 1)
        if len(batch) != size:
            raise ValueError(f"its batch at offset {place} has not the {size} bytes that its samples have")
        return batch, size


def _unpacked(content: Any, size: int | None = None) -> bytes:
    """The decompressed content, or its first `size` bytes."""
    pyarrow = import_pyarrow("a chunk of LitData that is compressed")
    return pyarrow.CompressedInputStream(pyarrow.BufferReader(content), "zstd").read(size)


_CHUNKS = {"": Chunk, "batch": ChunkOfBatches, "sample": ChunkOfPackedSamples}
