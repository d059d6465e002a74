"""Datasets that change each sample by a function."""

from __future__ import annotations

from typing import Any, Callable

from libai_data.data.attributes import attribute_of
from libai_data.data.datasets.fingerprint import fingerprint_of
from libai_data.data.random.sample_random import map_attempt, map_generator
from libai_data.data.transforms.timing import transform_time
from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import FUNCTION, check


class Map:
    """A dataset with each sample changed by a function.

    To skip samples use a `FilteredDataset`, and to change whole batches a `BatchTransform`.

    Args:
        dataset: the dataset whose samples are changed.
        function: called with a sample; returns the changed sample.

    Raises:
        ConfigError: `function` is not callable.
    """

    def __init__(self, dataset: Any, function: Callable[..., Any]) -> None:
        check({"function": FUNCTION}, function=function)
        refuse_outputs_without_indices(dataset)
        self.dataset = dataset
        self.function = function

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[index]
        with transform_time():
            return self.function(sample)

    @property
    def blend(self) -> Any:
        """The blend of the dataset; None if the dataset is no blend."""
        return attribute_of(self.dataset, "blend")

    def fingerprint(self) -> dict[str, Any]:
        return fingerprint_of(self.dataset)


class RandomMap(Map):
    """A dataset with each sample changed by a function that uses a random generator.

    Args:
        dataset: the dataset whose samples are changed.
        function: called with a sample and a numpy generator; returns the changed sample. The generator depends on seed,
            epoch and index. Nested `RandomMap`s get different generators.
    """

    def __getitem__(self, index: int) -> Any:
        with map_attempt():
            sample = self.dataset[index]
            with transform_time():
                return self.function(sample, map_generator())


def refuse_outputs_without_indices(dataset: Any) -> None:
    """Raise a ConfigError for a filter or packer, because its outputs depend on the order of its samples."""
    if attribute_of(dataset, "is_stream_transform", False):
        name = type(dataset).__name__
        raise ConfigError(
            f"the samples of a {name} have no index of their own; wrap it, as OneRound({name}(...)), or put filters "
            "and packers around Map, Subset, ConcatDataset and blends, not inside"
        )
