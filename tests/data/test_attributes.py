"""Objects that answer names they do not have are read as what they are; methods of a base class are not mistaken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Callable
from unittest.mock import MagicMock

import numpy as np
import pytest

from libai_data import CyclicSampler, DataLoader, from_iterable
from libai_data.data.attributes import attribute_of, batch_method_of, has_attribute
from libai_data.data.datasets import BlendedDataset, ConcatDataset, Map, Subset
from libai_data.loader import BatchLoader

SIZE = 8


class Samples:
    """The plainest dataset."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return {"y": np.int64(index)}


class Rows:
    """The plainest iterable."""

    def __iter__(self) -> Iterator[Any]:
        return iter([{"y": np.int64(index)} for index in range(SIZE)])


def fails(name: str) -> Any:
    raise KeyError(name)


ANSWERS: dict[str, Callable[[Any, str], Any]] = {
    "None": lambda self, name: None,
    "function": lambda self, name: lambda *args, **kwargs: None,
    "itself": lambda self, name: self,
    "name": lambda self, name: name,
    "True": lambda self, name: True,
    "KeyError": lambda self, name: fails(name),
}


def answering(kind: type, answer: str) -> Any:
    return type(kind.__name__, (kind,), {"__getattr__": ANSWERS[answer]})()


def mock() -> Any:
    made = MagicMock()
    made.__len__.return_value = SIZE
    made.__getitem__.side_effect = lambda index: {"y": np.int64(index)}
    return made


def numbers(loader: Any) -> list[int]:
    return [number for batch in loader.numpy() for number in batch["y"].tolist()]


USES: dict[str, Callable[[Any], Any]] = {
    "DataLoader": lambda dataset: DataLoader(dataset, batch_size=4),
    "workers": lambda dataset: DataLoader(dataset, batch_size=4, num_workers=1, worker_type="thread"),
    "stream": lambda dataset: from_iterable(dataset, 4),
    "Map": lambda dataset: DataLoader(Map(dataset, dict), batch_size=4),
    "Subset": lambda dataset: DataLoader(Subset(dataset, range(SIZE)), batch_size=4),
    "ConcatDataset": lambda dataset: DataLoader(ConcatDataset([dataset]), batch_size=4),
    "BlendedDataset": lambda dataset: DataLoader(BlendedDataset([dataset], [1]), batch_size=4),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("answer", [*ANSWERS, "mock"])
def test_a_dataset_that_answers_any_name_is_read_by_its_index(use: str, answer: str) -> None:
    loader = USES[use](mock() if answer == "mock" else answering(Samples, answer))
    assert numbers(loader) == list(range(SIZE))
    loader.close()


@pytest.mark.parametrize("answer", ANSWERS)
def test_samplers_take_a_dataset_that_answers_any_name(answer: str) -> None:
    dataset = answering(Samples, answer)
    loader = BatchLoader(dataset, CyclicSampler(dataset, 4))
    assert next(iter(loader.numpy()))["y"].tolist() == [0, 1, 2, 3]
    loader.close()


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_iterable_that_answers_any_name_is_iterated_over(answer: str) -> None:
    loader = from_iterable(answering(Rows, answer), 4)
    for _ in range(2):
        assert numbers(loader) == list(range(SIZE))
    loader.close()


class Together(Samples):
    """Reads many samples at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [{"y": np.int64(index)} for index in indices]


class Filled(Samples):
    """Fills the rows of a batch."""

    def read_batch(self, indices: np.ndarray, out: dict[str, np.ndarray]) -> None:
        out["y"][:] = indices


class Wrapper:
    """Changes samples, and has all else of the dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return {"y": self.dataset[index]["y"] + 100}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["dataset"], name)


def changed(kind: type) -> Any:
    def get(self: Any, index: int) -> Any:
        return {"y": super(type(self), self).__getitem__(index)["y"] + 100}

    return type("Changed", (kind,), {"__getitem__": get})()


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", [Together, Filled])
@pytest.mark.parametrize("make", [changed, lambda kind: Wrapper(kind())], ids=["subclass", "wrapper"])
def test_a_getitem_of_its_own_decides_what_the_samples_are(use: str, kind: type, make: Callable[[type], Any]) -> None:
    # `__getitems__` and `read_batch` below it would read the samples as they were.
    loader = USES[use](make(kind))
    assert numbers(loader) == list(range(100, 100 + SIZE))
    loader.close()


def test_a_subclass_of_a_subset_makes_its_own_samples() -> None:
    class Changed(Subset):
        def __getitem__(self, index: int) -> Any:
            return {"y": super().__getitem__(index)["y"] + 100}

    loader = DataLoader(Changed(Filled(), range(SIZE)), batch_size=4)
    assert numbers(loader) == list(range(100, 100 + SIZE))
    loader.close()


@pytest.mark.parametrize("kind", [Together, Filled])
def test_a_method_beside_or_above_getitem_reads_the_samples(kind: type) -> None:
    name = "__getitems__" if kind is Together else "read_batch"
    for each in (kind(), type("Derived", (kind,), {})()):
        assert batch_method_of(each, name) == getattr(each, name)
    assert batch_method_of(Samples(), name) is None
    one = Samples()
    vars(one)[name] = len
    assert batch_method_of(one, name) is len


def test_a_wrapper_has_what_it_wraps_and_a_mock_has_nothing() -> None:
    wrapper, made = Wrapper(Map(Samples(), dict)), MagicMock()
    assert attribute_of(wrapper, "function") is dict and not has_attribute(wrapper, "shard_lengths")
    assert not has_attribute(made, "set_epoch") and attribute_of(made, "set_epoch", 3) == 3
    made.set_epoch = print
    assert attribute_of(made, "set_epoch") is print
    assert has_attribute([], "__len__") and not has_attribute(answering(Rows, "None"), "__len__")
