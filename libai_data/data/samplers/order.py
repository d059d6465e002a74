"""Orders: the sample at each place of the endless stream, in O(1) time and memory for any place.

A shuffled order is a keyed permutation per epoch (`libai_data.data.random.permutation`). Nothing is drawn in advance,
stored or shared: any rank or worker computes any part of the order by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from libai_data.data.random.permutation import PERMUTATION_VERSION, permuted, places_in_permutation
from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import INT, check

ORDER_VERSION = PERMUTATION_VERSION
"""Increased whenever the same (seed, epoch, index) would give another order; a checkpoint records it."""


@dataclass(frozen=True)
class Order:
    """Place -> (epoch, index) over a dataset, epoch after epoch.

    Args:
        size: number of samples in the dataset; at least 1.
        seed: decides the permutations; any int.
        shuffle: a new permutation each epoch, or 0, 1, ... size-1 each epoch.
        epoch_size: places of one epoch; by default `size`. If smaller, each epoch leaves out the tail of its own
            permutation (`drop_last`).

    Raises:
        ConfigError: The dataset is empty, `seed` is no int, or `epoch_size` is not in 1..size.
    """

    size: int
    seed: int = 0
    shuffle: bool = True
    epoch_size: int = 0

    lanes = 1

    def __post_init__(self) -> None:
        check({"seed": INT}, seed=self.seed)
        object.__setattr__(self, "seed", int(self.seed))
        if self.size < 1:
            raise ConfigError(f"the dataset is empty: it has {self.size} samples, at least 1 is needed")
        object.__setattr__(self, "epoch_size", int(self.epoch_size) or self.size)
        self._check_epoch_size()

    def _check_epoch_size(self) -> None:
        if not 1 <= self.epoch_size <= self.size:
            raise ConfigError(
                f"epoch_size is {self.epoch_size}; a dataset of {self.size} samples allows 1 to {self.size}"
            )

    @property
    def can_locate(self) -> bool:
        """Whether `locate` works: an order from a state may have only a digest of weights or of shard lengths."""
        return True

    def in_rows(self, places: np.ndarray) -> np.ndarray:
        """Sort places of global batches, int64 [batches, size], into the order of the rows."""
        return np.take_along_axis(places, self.rows_by_lane(places), axis=1)

    def rows_by_lane(self, places: np.ndarray) -> np.ndarray:
        """For each row of a batch, the column of its place: int64, shape of `places`; a stable sort by lane."""
        return np.broadcast_to(np.arange(places.shape[-1]), places.shape)

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Epochs and indices of the samples at these places of any epochs, int64 [n] each, at least 0, in any order."""
        epochs, offsets = np.divmod(np.asarray(positions, dtype=np.int64), self.epoch_size)
        if not self.shuffle or not len(offsets):
            return epochs, offsets
        first, last = int(epochs.min()), int(epochs.max())
        if first == last:
            return epochs, self._indices_at(first, offsets)
        indices = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            indices[rows] = self._indices_at(int(epoch), offsets[rows])
        return epochs, indices

    def _indices_at(self, epoch: int, offsets: np.ndarray) -> np.ndarray:
        """The indices of the samples at these offsets in an epoch, int64 [n]."""
        return permuted(self.size, self.seed, epoch, offsets)

    def uses_of(self, index: int, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Find all places of a sample from `first` up to before `end`; the inverse of `locate`. Returns epochs and
        places, int64 [n] each, ascending. An IndexError if the dataset has no such sample."""
        self._check_index(index)
        epochs = range(first // self.epoch_size, -(-end // self.epoch_size))
        places = np.array([place for epoch in epochs for place in self._places_in_epoch(epoch, index)], dtype=np.int64)
        places = places[(places >= first) & (places < end)]
        return places // self.epoch_size, places

    def _check_index(self, index: int) -> None:
        if not 0 <= index < self.size:
            raise IndexError(f"sample {index} is outside a dataset of {self.size} samples")

    def _places_in_epoch(self, epoch: int, index: int) -> Sequence[int]:
        """The places of a sample in an epoch, ascending; none if the epoch leaves the sample out."""
        offset = index
        if self.shuffle:
            offset = int(places_in_permutation(self.size, self.seed, epoch, np.array([index]))[0])
        return [epoch * self.epoch_size + offset] if offset < self.epoch_size else []

    def in_words(self) -> str:
        """What decides the order, in words for messages."""
        how = "shuffled in each epoch with" if self.shuffle else "in its own order,"
        tail = self.size - self.epoch_size
        return f"{how} seed {self.seed}" + (f"; drop_last leaves out {tail} each epoch" if tail else "")

    def to_json(self) -> dict[str, Any]:
        """The order, as plain numbers."""
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "samples": self.size,
            "epoch_size": self.epoch_size,
            "order_version": ORDER_VERSION,
        }


def check_holds_a_batch(samples: int, global_batch_size: int, data_parallel_size: int) -> None:
    """Raise a ConfigError if an epoch cannot fill one global batch: `drop_last` would leave out all samples."""
    if samples < global_batch_size:
        raise ConfigError(
            f"drop_last leaves out all {samples} samples of an epoch, fewer than one global batch of "
            f"{global_batch_size} (micro_batch_size {global_batch_size // data_parallel_size} x data_parallel_size "
            f"{data_parallel_size}); set drop_last=False, or a smaller batch_size (train.train_micro_batch_size)"
        )
