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

    A leaf of a nested sample is named `outer.inner`, and those of a tuple or list are "0", "1" and so on; a sample that
    is a single value is {"0": value}. Numbers and texts are Python's, arrays and tensors numpy's, raw images (`pil`)
    arrays, and all that is encoded, such as images, sound and video, is bytes. Of chunks that were written for
    `TokensLoader`, a sample is the tokens that were yielded at once.

    Chunks that are compressed by zstd are decompressed into the cache of this node (`storage.LocalFile`). Where batches
    of samples are compressed, or are rows of Arrow, each process keeps those used last: 256 MiB of all chunks together.
    Chunks hold no checksums.

    Args:
        paths: folders with an `index.json`, or chunks in such a folder; see `storage.listed`.
        columns: names of those to read; by default all.
        described: path -> what the index says of a chunk, if it has been read; only for a single open chunk.

    Raises:
        ConfigError: There is no such file or column, or no index of the chunks.
        FormatError: A file is cut short or damaged, encrypted, compressed in another way, or has a column of pickled
            objects, or of a dtype that numpy does not have.
    """

    _format = "litdata"
    _decoder_of = staticmethod(decoder_of)
    _kept: LastUsed | None = None

    def _shard(self, file: MappedFile, described: DescribedShard, columns: Sequence[str] | None) -> Chunk:
        self._kept = self._kept or LastUsed(_CACHE_BYTES)
        return _CHUNKS[described.compressed](self._kept, file, described, columns, self._decoder_of)
