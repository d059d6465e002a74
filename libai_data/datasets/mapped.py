"""Datasets whose samples are changed, one by one, by a function."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

from libai_data.datasets.fingerprint import fingerprint_of
from libai_data.sample_random import sample_generator
from libai_data.transforms.timing import transform_time

_FIRST_STREAM = 1 << 16


class Map:
    """A dataset with each sample changed by a function.

    What leaves samples out is a `FilteredDataset`, and what changes whole batches a `BatchTransform`.

    Args:
        dataset: whose samples are changed.
        function: from a sample to a sample.
    """

    def __init__(self, dataset: Any, function: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self.function = function

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[index]
        with transform_time():
            return self.function(sample)

    def fingerprint(self) -> dict[str, Any]:
        """That of the dataset."""
        return fingerprint_of(self.dataset)


class RandomMap:
    """A dataset with each sample changed by a function that draws.

    Args:
        dataset: whose samples are changed.
        function: from a sample and a generator to a sample. The generator depends on (seed, epoch, index) alone, and on
            how many `RandomMap`s lie below, so that no two of them draw the same numbers.
    """

    def __init__(self, dataset: Any, function: Callable[[Any, np.random.Generator], Any]) -> None:
        self.dataset = dataset
        self.function = function
        self._stream = _FIRST_STREAM + _random_maps_in(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[index]
        with transform_time():
            return self.function(sample, sample_generator(self._stream))

    def fingerprint(self) -> dict[str, Any]:
        """That of the dataset."""
        return fingerprint_of(self.dataset)


def _random_maps_in(dataset: Any) -> int:
    depth = 0
    while isinstance(dataset, (Map, RandomMap)):
        depth += isinstance(dataset, RandomMap)
        dataset = dataset.dataset
    return depth
