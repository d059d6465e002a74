"""Samples of MDS shards, the format of MosaicML Streaming, by index."""

from __future__ import annotations

from libai_data.data.sources.described_source import DescribedSource
from libai_data.data.sources.mds_values import decoder_of


class MDSSource(DescribedSource):
    """The samples of MDS shards: dicts with a value for each column.

    Numbers, texts and JSON become Python objects. Arrays and raw images (`pil`) become numpy arrays. Encoded images
    stay bytes. Shards that are compressed by zstd are decompressed into the cache of this node (`storage.LocalFile`),
    and compared with the digests in the index. Other shards have no checksums.

    Args:
        paths: folders with an `index.json`, or shards in such a folder; see `storage.listed`.
        columns: names of the columns to read; by default all.
        described: path -> description of a shard, if the index has been read; only for a single open shard.

    Raises:
        ConfigError: There is no such file or column, or no index of the shards.
        FormatError: A file is cut short or damaged, compressed in another way, or has a column of pickled objects.
    """

    _format = "mds"
    _decoder_of = staticmethod(decoder_of)
