"""A stream of the batches that a dataset gives by their index."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from libai_data.data.datasets.combine import length_of
from libai_data.data.random.permutation import permuted
from libai_data.loader.worker_info import get_worker_info


class IndexedBatches:
    """Iterates over `dataset[0]` to `dataset[len(dataset) - 1]`, each of which is a batch.

    If the stream is read in shards, each shard has every `num_shards`-th batch.

    Args:
        shuffle: use another order of the batches in each epoch.
    """

    def __init__(self, dataset: Any, shuffle: bool, seed: int) -> None:
        self.dataset, self._shuffle, self._seed = dataset, shuffle, seed
        self.__qualname__ = type(dataset).__name__  # what errors name
        self._epoch = 0

    def __len__(self) -> int:
        return length_of(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        size, info = length_of(self.dataset), get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for place in range(first, size, step):
            index = int(permuted(size, self._seed, self._epoch, np.array([place]))[0]) if self._shuffle else place
            yield self.dataset[index]
