"""A dataset whose samples have names, for a batch transform that changes fields by their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

from libai_data.data.attributes import batch_method_of
from libai_data.data.items import named


class NamedSamples:
    """A dataset with names for the values of its tuples; of samples with names, the fields to use."""

    def __init__(self, dataset: Any, names: Sequence[str]) -> None:
        self.dataset = dataset
        self._names = tuple(names)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return named(self.dataset[index], self._names)

    @property
    def __getitems__(self) -> Callable[[list[int]], list[dict[str, Any]]]:
        get_items = batch_method_of(self.dataset, "__getitems__")
        if get_items is None:
            raise AttributeError(f"{type(self.dataset).__name__} has no __getitems__")
        return lambda indices: [named(sample, self._names) for sample in get_items(indices)]
