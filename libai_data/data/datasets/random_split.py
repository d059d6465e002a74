"""Seeded random parts of a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Callable

import numpy as np

from libai_data.data.datasets.combine import check_index
from libai_data.data.datasets.fingerprint import fingerprint_of
from libai_data.data.datasets.reading_together import joint_read_batch
from libai_data.data.datasets.shares import shares_of, split_evenly
from libai_data.errors import ConfigError
from libai_data.data.random.permutation import permuted


class RandomPart:
    """A part of a dataset in a random order; takes no memory, however large it is.

    Args:
        dataset: the whole.
        seed: decides the order of the whole.
        start: the first place of the part in this order.
        stop: the place behind the part.
    """

    def __init__(self, dataset: Any, seed: int, start: int, stop: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.start = start
        self.stop = stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> Any:
        check_index(index, len(self))
        return self.dataset[int(self.indices(np.array([index]))[0])]

    def indices(self, own: np.ndarray) -> np.ndarray:
        """The indices in the whole dataset of these of the part, int64 [n]."""
        return permuted(len(self.dataset), self.seed, 0, self.start + np.asarray(own, dtype=np.int64))

    @property
    def read_batch(self) -> Callable[..., None]:
        """Reads samples together; only there if the dataset has it."""
        return joint_read_batch([self.dataset], self._locate_all)

    def _locate_all(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros_like(indices), self.indices(indices)

    def fingerprint(self) -> dict[str, Any]:
        """Which part of which order of which dataset."""
        return {
            **fingerprint_of(self.dataset),
            "samples": len(self.dataset),
            "random_part": [self.seed, self.start, self.stop],
        }


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
