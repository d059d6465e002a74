"""Orders: which sample stands at which position of the endless stream, in O(1) time and memory for any position.

A shuffled order is a keyed permutation per epoch: the generalised Feistel network of Black and Rogaway, "Ciphers with
Arbitrary Finite Domains" (CT-RSA 2002), with cycle walking, and splitmix64's finaliser as the round function. Nothing
is drawn in advance, stored or shared: any rank or worker computes any part of the order by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import Callable, Tuple

import numpy as np

from libai_data.errors import ConfigError
from libai_data.mixing import combine64, mix64_array

ORDER_VERSION = 1
"""Raised whenever the same (seed, epoch, index) would give another order; a checkpoint records it."""

_ROUNDS = 6
_SORTED_BELOW = 1024


@dataclass(frozen=True)
class Order:
    """Position -> (epoch, index) over a dataset, epoch after epoch.

    Args:
        size: number of samples in the dataset; at least 1.
        seed: decides the permutations; any int.
        shuffle: a new permutation each epoch, or 0, 1, ... size-1 each epoch.
        epoch_size: positions of one epoch; by default `size`. With less, each epoch leaves out the tail of its own
            permutation (`drop_last`).

    Raises:
        ConfigError: The dataset is empty, `seed` is no int, or `epoch_size` is not in 1..size.
    """

    size: int
    seed: int = 0
    shuffle: bool = True
    epoch_size: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.seed, (int, np.integer)) or isinstance(self.seed, bool):
            raise ConfigError(f"seed is {self.seed!r}; it must be an int")
        object.__setattr__(self, "seed", int(self.seed))
        if self.size < 1:
            raise ConfigError(f"the dataset is empty: it has {self.size} samples, at least 1 is needed")
        if self.epoch_size == 0:
            object.__setattr__(self, "epoch_size", self.size)
        if not 1 <= self.epoch_size <= self.size:
            raise ConfigError(
                f"epoch_size is {self.epoch_size}; a dataset of {self.size} samples allows 1 to {self.size}"
            )

    def locate(self, positions: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Find the samples at these positions.

        Args:
            positions: int64 [n], each at least 0; in any order, over any epochs.

        Returns:
            epochs and indices, int64 [n] each.
        """
        epochs, offsets = np.divmod(np.asarray(positions, dtype=np.int64), self.epoch_size)
        if not self.shuffle or not len(offsets):
            return epochs, offsets
        first, last = int(epochs.min()), int(epochs.max())
        if first == last:
            return epochs, self._permute(first, offsets)
        indices = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            indices[rows] = self._permute(int(epoch), offsets[rows])
        return epochs, indices

    def find(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        """Find where samples stand in an epoch; the inverse of `locate`.

        Args:
            epoch: the epoch.
            indices: int64 [n], each within the dataset.

        Returns:
            Positions, int64 [n]; -1 where the epoch leaves the sample out.

        Raises:
            IndexError: An index lies outside the dataset.
        """
        indices = np.asarray(indices, dtype=np.int64)
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < self.size:
            raise IndexError(f"a sample of {indices.tolist()} lies outside a dataset of {self.size} samples")
        offsets = self._offsets_of(epoch, indices) if self.shuffle and len(indices) else indices
        return np.where(offsets < self.epoch_size, epoch * self.epoch_size + offsets, -1)

    def _offsets_of(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        if self.size < _SORTED_BELOW:
            return np.argsort(_small_permutation(self.size, self.seed, epoch), kind="stable")[indices]
        keys = _round_keys(self.seed, epoch)
        return _walk(indices.astype(np.uint64), self.size, keys, _feistel_back).astype(np.int64)

    def _permute(self, epoch: int, offsets: np.ndarray) -> np.ndarray:
        if self.size < _SORTED_BELOW:
            return _small_permutation(self.size, self.seed, epoch)[offsets]
        keys = _round_keys(self.seed, epoch)
        return _walk(offsets.astype(np.uint64), self.size, keys, _feistel).astype(np.int64)


def _round_keys(seed: int, epoch: int) -> Tuple[int, ...]:
    return tuple(combine64(ORDER_VERSION, seed, epoch, number) for number in range(_ROUNDS))


@lru_cache(maxsize=4)
def _small_permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    keys = np.arange(size, dtype=np.uint64) + np.uint64(combine64(ORDER_VERSION, seed, epoch))
    return np.argsort(mix64_array(mix64_array(keys) ^ np.uint64(combine64(seed, epoch))), kind="stable")


_Cipher = Callable[[np.ndarray, int, int, Tuple[int, ...]], np.ndarray]


def _walk(values: np.ndarray, size: int, keys: Tuple[int, ...], cipher: _Cipher) -> np.ndarray:
    """Encipher within the smallest grid that holds `size`, again and again until the value lies below `size`.

    With the inverse cipher it walks the same cycles backwards, and so is the inverse.
    """
    columns = isqrt(size - 1) + 1
    rows = -(-size // columns)
    values = cipher(values, columns, rows, keys)
    outside = np.flatnonzero(values >= np.uint64(size))
    while len(outside):
        values[outside] = cipher(values[outside], columns, rows, keys)
        outside = outside[values[outside] >= np.uint64(size)]
    return values


def _feistel(values: np.ndarray, columns: int, rows: int, keys: Tuple[int, ...]) -> np.ndarray:
    right, left = np.divmod(values, np.uint64(columns))
    for number, key in enumerate(keys):
        modulus = np.uint64(columns if number % 2 == 0 else rows)
        left, right = right, (left + mix64_array(right ^ np.uint64(key)) % modulus) % modulus
    return right * np.uint64(columns) + left


def _feistel_back(values: np.ndarray, columns: int, rows: int, keys: Tuple[int, ...]) -> np.ndarray:
    right, left = np.divmod(values, np.uint64(columns))
    for number, key in reversed(list(enumerate(keys))):
        modulus = np.uint64(columns if number % 2 == 0 else rows)
        left, right = (right + modulus - mix64_array(left ^ np.uint64(key)) % modulus) % modulus, left
    return right * np.uint64(columns) + left
