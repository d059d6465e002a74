"""Datasets that number their classes by themselves, such as folders of images, must agree on the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from libai_data.data.attributes import attribute_of
from libai_data.data.datasets.combine import ConcatDataset, RandomPart, Subset
from libai_data.errors import ConfigError


def check_class_numbers(datasets: Iterable[Any]) -> None:
    """Refuse datasets that are used together, such as for training and test, if a number means two classes.

    A dataset names its classes if it has `class_to_idx`, and no `target_transform`, which may change the numbers.
    """
    known: dict[int, tuple[str, Any]] = {}
    for dataset in chain.from_iterable(map(_with_names, datasets)):
        for name, number in dataset.class_to_idx.items():
            other_name, other = known.setdefault(number, (name, dataset))
            if name != other_name:
                differing = sorted(other.class_to_idx.keys() ^ dataset.class_to_idx.keys())
                raise ConfigError(
                    f"class {number} is {other_name!r} in {_place_of(other)}, but {name!r} in {_place_of(dataset)}. "
                    f"Only one of them has {', '.join(map(repr, differing[:5])) or 'this order'} ({len(differing)} "
                    "classes); make an empty folder for each missing class, or pass a target_transform that returns "
                    "the same number for the same class"
                )


def _with_names(dataset: Any) -> Iterator[Any]:
    """The datasets that name their classes, of a dataset that is one or joins some."""
    if isinstance(dataset, (Subset, RandomPart)):
        yield from _with_names(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        yield from chain.from_iterable(map(_with_names, dataset.datasets))
    elif isinstance(attribute_of(dataset, "class_to_idx"), Mapping) and not attribute_of(dataset, "target_transform"):
        yield dataset


def _place_of(dataset: Any) -> str:
    return str(attribute_of(attribute_of(dataset, "source", dataset), "root") or type(dataset).__name__)
