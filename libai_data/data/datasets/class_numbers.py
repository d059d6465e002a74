"""Datasets that number their classes by themselves, such as folders of images, must agree on the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import SimpleNamespace
from typing import Any

from libai_data.data.attributes import attribute_of, inner_datasets
from libai_data.errors import CheckpointError, ConfigError

_MOST_WRAPPERS = 16


class ClassNumbers:
    """The numbers of classes in datasets that are used together, as a state for checkpoints; see
    `check_class_numbers`."""

    may_be_absent = True  # Checkpoints of earlier versions do not have this state.

    def __init__(self, datasets: Iterable[Any]) -> None:
        self._datasets = list(chain.from_iterable(map(_with_names, datasets)))
        check_class_numbers(self._datasets)

    def state_dict(self) -> dict[str, int]:
        return {name: int(number) for each in self._datasets for name, number in each.class_to_idx.items()}

    def load_state_dict(self, state: Any) -> None:
        """Refuse a checkpoint in which a number means another class than in the datasets."""
        if not isinstance(state, Mapping) or not all(type(number) is int for number in state.values()):
            raise CheckpointError(f"the numbers of classes in the checkpoint are {state!r:.100}, not a name for each")
        check_class_numbers([SimpleNamespace(class_to_idx=state, root="the checkpoint"), *self._datasets])


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


def _with_names(dataset: Any, depth: int = 0) -> Iterator[Any]:
    """The datasets that name their classes, of a dataset that is one, or wraps or joins some, as torch's `Subset`."""
    if isinstance(attribute_of(dataset, "class_to_idx"), Mapping):
        if not attribute_of(dataset, "target_transform"):
            yield dataset
        return
    for each in inner_datasets(dataset) if depth < _MOST_WRAPPERS else ():
        yield from _with_names(each, depth + 1)


def _place_of(dataset: Any) -> str:
    return str(attribute_of(attribute_of(dataset, "source", dataset), "root") or type(dataset).__name__)
