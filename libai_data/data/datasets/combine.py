"""Datasets made of datasets: one behind the other, and parts of one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Callable

import numpy as np

from libai_data.data.datasets.fingerprint import fingerprint_of
from libai_data.data.datasets.reading_together import joint_read_batch
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


class Subset:
    """A contiguous part of a dataset.

    Args:
        dataset: the whole.
        start: its first index that belongs to the part.
        stop: its first index behind the part.

    Raises:
        ConfigError: Not 0 <= start <= stop <= len(dataset).
    """

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
        return self.dataset[self.start + index]

    @property
    def read_batch(self) -> Callable[..., None]:
        """Reads samples together; only there if the dataset has it."""
        return joint_read_batch([self.dataset], self._locate_all)

    def _locate_all(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros_like(indices), self.start + indices

    def fingerprint(self) -> dict[str, Any]:
        """Which part of which dataset."""
        return {**fingerprint_of(self.dataset), "samples": len(self.dataset), "part": [self.start, self.stop]}


def check_index(index: int, length: int) -> None:
    """Refuse an index outside a dataset.

    Raises:
        IndexError: With the bounds.
    """
    if not 0 <= index < length:
        raise IndexError(f"index {index} lies outside a dataset of {length} samples (0 to {length - 1})")
