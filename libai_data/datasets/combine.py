"""Datasets made of datasets: one behind the other, and parts of one."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Any, List, Sequence

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
        self._ends: List[int] = list(accumulate(len(dataset) for dataset in self.datasets))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        check_index(index, len(self))
        number = bisect_right(self._ends, index)
        return self.datasets[number][index - (self._ends[number - 1] if number else 0)]


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


def check_index(index: int, length: int) -> None:
    """Refuse an index outside a dataset.

    Raises:
        IndexError: With the bounds.
    """
    if not 0 <= index < length:
        raise IndexError(f"index {index} lies outside a dataset of {length} samples (0 to {length - 1})")
