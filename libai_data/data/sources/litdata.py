"""Samples of the chunks that LitData writes (`optimize`), by index."""

from __future__ import annotations

from collections.abc import Sequence

from libai_data.data.sources.described_source import DescribedSource
from libai_data.data.sources.last_used import LastUsed
from libai_data.data.sources.litdata_chunks import Chunk, ChunkOfBatches, ChunkOfPackedSamples
from libai_data.data.sources.litdata_values import decoder_of
from libai_data.data.sources.mapped_file import MappedFile
from libai_data.data.sources.shard_index import DescribedShard

_CHUNKS = {"": Chunk, "batch": ChunkOfBatches, "sample": ChunkOfPackedSamples}
_CACHE_BYTES = 256 << 20


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
    """

    _format = "litdata"
    _decoder_of = staticmethod(decoder_of)
    _kept: LastUsed | None = None

    def _shard(self, file: MappedFile, described: DescribedShard, columns: Sequence[str] | None) -> Chunk:
        self._kept = self._kept or LastUsed(_CACHE_BYTES)
        return _CHUNKS[described.compressed](self._kept, file, described, columns, self._decoder_of)
