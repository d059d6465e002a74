"""The number of samples of each shard file of a dataset, so that samples of one shard file are read close together."""

from __future__ import annotations

from typing import Any

import numpy as np

from libai_data.data.attributes import attribute_of
from libai_data.data.datasets.combine import ConcatDataset, Subset, length_of
from libai_data.data.datasets.mapped import Map
from libai_data.data.datasets.stream_transform import StreamTransform
from libai_data.data.nesting import array_of
from libai_data.errors import ConfigError


def shard_lengths_of(dataset: Any) -> np.ndarray:
    """The number of samples of each shard file of a dataset, int64 [shards], in the order of the indices.

    The dataset is a source of files, or has an attribute `shard_lengths`; or is a `ConcatDataset`, a contiguous
    `Subset`, a `Map`, a filter or a packer of these; of the last two, input samples are counted. Otherwise a
    ConfigError.
    """
    lengths = array_of(_lengths(dataset), int)
    name, samples = type(dataset).__name__, length_of(dataset)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths < 0).any():
        raise ConfigError(
            f"shard_lengths of {name} are {lengths!r:.100}; they must be ints of at least 0, one for each shard"
        )
    if lengths.sum() != samples:
        raise ConfigError(
            f"shard_lengths of {name} add up to {lengths.sum()}, but the dataset has {samples} samples; each sample "
            "belongs to one shard"
        )
    return lengths.astype(np.int64)


def _lengths(dataset: Any) -> Any:
    lengths = attribute_of(dataset, "shard_lengths")
    if lengths is not None:
        return lengths
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([shard_lengths_of(each) for each in dataset.datasets])
    if isinstance(dataset, Subset) and dataset.is_contiguous:
        ends = np.cumsum(shard_lengths_of(dataset.dataset))
        return np.diff(np.clip(ends, dataset.start, dataset.stop), prepend=dataset.start)
    if isinstance(dataset, (Map, StreamTransform)):
        return shard_lengths_of(dataset.dataset)
    raise ConfigError(
        f"the shards of a {type(dataset).__name__} are not known, and lanes read shard by shard; give the dataset an "
        "attribute shard_lengths, the number of samples of each shard (that of its source), or leave lanes out"
    )
