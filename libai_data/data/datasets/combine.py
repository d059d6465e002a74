"""Datasets made of datasets: one behind the other, and parts of one, in its order or in a random one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Callable

import numpy as np

from libai_data.data.datasets.fingerprint import fingerprint_of
from libai_data.data.datasets.reading_together import joint_read_batch
from libai_data.data.datasets.shares import shares_of, split_evenly
from libai_data.data.random.permutation import permuted
from libai_data.errors import ConfigError


class ConcatDataset:
    """Several datasets, one behind the other.

    Args:
        datasets: at least one; all must have the same fields.

    Raises:
        ConfigError: There is none.
    """

    def __init__(self, datasets: Sequence[Any]) -> None:
        self.datasets = list(datasets)
        if not self.datasets:
            raise ConfigError("ConcatDataset got no datasets; give it at least one")
        self._ends: list[int] = list(accumulate(len(dataset) for dataset in self.datasets))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        check_index(index, len(self))
        number, own_index = self.locate(index)
        return self.datasets[number][own_index]

    def locate(self, index: int) -> tuple[int, int]:
        """The number of the dataset that holds a sample, and the sample's index in it."""
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)

    @property
    def read_batch(self) -> Callable[..., None]:
        """Reads samples together; only there if all the datasets have it."""
        return joint_read_batch(self.datasets, self._locate_all)

    def _locate_all(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        numbers = np.searchsorted(self._ends, indices, side="right")
        return numbers, indices - np.concatenate([[0], self._ends])[numbers]

    def fingerprint(self) -> list[dict[str, Any]]:
        """Length and fingerprint of each dataset."""
        return [{**fingerprint_of(dataset), "samples": len(dataset)} for dataset in self.datasets]


class _Part:
    """Samples of a dataset, as many as lie between two places of some order of it."""

    def __init__(self, dataset: Any, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= len(dataset):
            raise ConfigError(f"a part from {start} to {stop} does not lie within a dataset of {len(dataset)} samples")
        self.dataset = dataset
        self.start = start
        self.stop = stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> Any:
        check_index(index, len(self))
        return self.dataset[int(self.indices(np.array([index]))[0])]

    def indices(self, own: np.ndarray) -> np.ndarray:
        """The indices in the whole dataset of these of the part, int64 [n]."""
        raise NotImplementedError

    @property
    def read_batch(self) -> Callable[..., None]:
        """Reads samples together; only there if the dataset has it."""
        return joint_read_batch([self.dataset], lambda indices: (np.zeros_like(indices), self.indices(indices)))

    def fingerprint(self) -> dict[str, Any]:
        """Which part of which order of which dataset."""
        return {**fingerprint_of(self.dataset), "samples": len(self.dataset)}


class Subset(_Part):
    """A contiguous part of a dataset.

    Args:
        dataset: the whole.
        start: its first index that belongs to the part.
        stop: its first index behind the part.

    Raises:
        ConfigError: Not 0 <= start <= stop <= len(dataset).
    """

    def indices(self, own: np.ndarray) -> np.ndarray:
        return self.start + own

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "part": [self.start, self.stop]}


class RandomPart(_Part):
    """A part of a dataset in a random order; takes no memory, however large it is.

    Args:
        dataset: the whole.
        seed: decides the order of the whole.
        start: the first place of the part in this order.
        stop: the place behind the part.
    """

    def __init__(self, dataset: Any, seed: int, start: int, stop: int) -> None:
        super().__init__(dataset, start, stop)
        self.seed = seed

    def indices(self, own: np.ndarray) -> np.ndarray:
        return permuted(len(self.dataset), self.seed, 0, self.start + np.asarray(own, dtype=np.int64))

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "random_part": [self.seed, self.start, self.stop]}


def random_split(dataset: Any, fractions: Sequence[float], seed: int = 0) -> list[RandomPart]:
    """Split a dataset at random into parts that share no sample and leave none out.

    Args:
        dataset: the whole.
        fractions: of the parts, none negative; only their proportions matter, so numbers of samples do as well.
        seed: decides which sample comes into which part.

    Returns:
        The parts. Their sizes add up to the dataset's, and each is less than one sample from its fraction.

    Raises:
        ConfigError: There are no fractions, one is negative or no number, or all are 0; or `seed` is no int.
    """
    if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool):
        raise ConfigError(f"seed is {seed!r}; it must be an int")
    sizes = split_evenly(len(dataset), shares_of("fractions", fractions))
    ends = list(accumulate(sizes))
    return [RandomPart(dataset, int(seed), end - size, end) for size, end in zip(sizes, ends)]


def check_index(index: int, length: int) -> None:
    """Refuse an index outside a dataset.

    Raises:
        IndexError: With the bounds.
    """
    if not 0 <= index < length:
        raise IndexError(f"index {index} lies outside a dataset of {length} samples (0 to {length - 1})")
