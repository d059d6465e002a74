"""Datasets made of datasets: several datasets in a row; and parts of a dataset, in its order or in a random order.

If the datasets have `read_batch`, each dataset reads its own rows of a batch together.
"""

from __future__ import annotations

import inspect
import operator
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, islice
from typing import Any, Callable

import numpy as np

from libai_data.data.attributes import batch_method_of
from libai_data.data.datasets.document_parts import refuse_repeated
from libai_data.data.datasets.fingerprint import fingerprint_of, hash_of
from libai_data.data.datasets.mapped import refuse_outputs_without_indices
from libai_data.data.datasets.shares import shares_of, split_evenly
from libai_data.data.items import ends_of
from libai_data.data.nesting import array_of
from libai_data.data.random.permutation import permuted
from libai_data.data.random.sample_random import reading_some_of_them
from libai_data.errors import ConfigError, error_text
from libai_data.errors.argument_rules import check_types

Rows = Mapping[str, np.ndarray]
Parts = Mapping[str, tuple[slice, ...]]
Locate = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]

_ROWS_OF = {
    ("pandas", "DataFrame"): 'table.to_dict("records")',
    ("pandas", "Series"): "series.to_numpy()",
    ("pyarrow", "Table"): "table.to_pylist()",
    ("pyarrow", "RecordBatch"): "table.to_pylist()",
}


class ConcatDataset:
    """Several datasets, one after the other.

    Args:
        datasets: at least one; all must have the same fields.

    Raises:
        ConfigError: There is no dataset, or one has no length or no indices; or, by `len`, one has another length now.
    """

    def __init__(self, datasets: Sequence[Any]) -> None:
        check_types(ConcatDataset, locals())
        self.datasets = list(datasets)
        if not self.datasets:
            raise ConfigError("ConcatDataset got no datasets; give it at least one")
        self._lengths = [*map(indexed_length, self.datasets)]
        self._ends: list[int] = list(accumulate(self._lengths))
        length_of(self)

    def __len__(self) -> int:
        for number, (dataset, before) in enumerate(zip(self.datasets, self._lengths)):
            if len(dataset) != before:
                raise ConfigError(
                    f"dataset {number} of a {type(self).__name__}, a {type(dataset).__name__}, has {len(dataset)} "
                    f"samples, but had {before} when the datasets were joined; join them again"
                )
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        check_index(index, self._ends[-1])
        number, own_index = self.locate(index)
        return self.datasets[number][own_index]

    def locate(self, index: int) -> tuple[int, int]:
        """The number of a sample's dataset, and the sample's index in this dataset."""
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)

    @property
    def read_batch(self) -> Callable[..., None]:
        """Reads samples together. The attribute exists only if all datasets have `read_batch`."""
        return joint_read_batch(self.datasets, self.locate_all)

    def locate_all(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`locate` for many indices, int64 [n] each."""
        numbers = np.searchsorted(self._ends, indices, side="right")
        return numbers, indices - np.concatenate([[0], self._ends])[numbers]

    def fingerprint(self) -> list[dict[str, Any]]:
        """Length and fingerprint of each dataset."""
        return [{**fingerprint_of(dataset), "samples": len(dataset)} for dataset in self.datasets]


class _Part:
    """The samples of a dataset between two places of an order, which the subclass defines."""

    def __init__(self, dataset: Any, start: int, stop: int) -> None:
        check_types(_Part, locals())
        samples = indexed_length(dataset)
        if not 0 <= start <= stop <= samples:
            raise ConfigError(f"a part from {start} to {stop} is not within a dataset of {samples} samples")
        self.dataset = dataset
        self._samples = samples
        self.start = int(start)
        self.stop = int(stop)

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> Any:
        check_index(index, len(self))
        return self.dataset[int(self.indices(np.array([index]))[0])]

    def indices(self, own: np.ndarray) -> np.ndarray:
        """The indices in the whole dataset, int64 [n], of the part's indices `own`, int64 [n]."""
        raise NotImplementedError

    @property
    def read_batch(self) -> Callable[..., None]:
        """Reads samples together. The attribute exists only if the dataset has `read_batch`."""
        return joint_read_batch([self.dataset], lambda indices: (np.zeros_like(indices), self.indices(indices)))

    def fingerprint(self) -> dict[str, Any]:
        """Fingerprint and length of the dataset; subclasses add the part and its order."""
        return {**fingerprint_of(self.dataset), "samples": len(self.dataset)}


class Subset(_Part):
    """A part of a dataset: contiguous, `Subset(dataset, 10, 20)`, or with given indices, `Subset(dataset, [3, 1, 4])`.

    Args:
        dataset: the whole dataset.
        start: the first index of the part; or a list, range or array of all its indices, in their order.
        stop: the first index after the part; None if `start` lists all indices.

    Raises:
        ConfigError: Not 0 <= start <= stop <= len(dataset), or an index is outside the dataset.
    """

    def __init__(self, dataset: Any, start: int | Sequence[int] | np.ndarray, stop: int | None = None) -> None:
        self._listed: np.ndarray | None = None
        if stop is None and isinstance(start, range) and start.step == 1:
            stop = max(start.start, start.stop)
            start = start.start
        if stop is None:
            listed = array_of(start, int)
            if listed.ndim != 1 or listed.dtype.kind not in "iu":
                raise ConfigError(f"Subset got {start!r:.100}; give a list of indices, or the first one and the last")
            size = indexed_length(dataset)
            outside = listed[(listed < 0) | (listed >= size)]
            if len(outside):
                raise ConfigError(f"Subset names the index {outside[0]}; the dataset has {size} samples")
            self._listed = listed.astype(np.int64)
            self.dataset, self.start, self.stop = dataset, 0, len(listed)
        else:
            super().__init__(dataset, start, stop)  # type: ignore[arg-type]

    @property
    def is_contiguous(self) -> bool:
        """Whether the part is all samples from `start` to before `stop`, in the order of the dataset."""
        return self._listed is None

    def indices(self, own: np.ndarray) -> np.ndarray:
        return self.start + own if self._listed is None else self._listed[own]

    def fingerprint(self) -> dict[str, Any]:
        if self._listed is None:
            return {**super().fingerprint(), "part": [self.start, self.stop]}
        return {**super().fingerprint(), "part": [len(self._listed), hash_of(self._listed.tobytes(), 8)]}


class RandomPart(_Part):
    """A part of a dataset in a random order; its memory does not depend on its size.

    Args:
        dataset: the whole dataset.
        seed: decides the order of the whole dataset.
        start: the first place of the part in this order.
        stop: the first place after the part.
    """

    def __init__(self, dataset: Any, seed: int, start: int, stop: int) -> None:
        check_types(RandomPart, locals())
        super().__init__(dataset, start, stop)
        self.seed = int(seed)

    def indices(self, own: np.ndarray) -> np.ndarray:
        # If the dataset grows, the parts must not exchange samples.
        return permuted(self._samples, self.seed, 0, self.start + np.asarray(own, dtype=np.int64))

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "random_part": [self.seed, self.start, self.stop]}


def random_split(dataset: Any, fractions: Sequence[float], seed: int = 0) -> list[RandomPart]:
    """Split a dataset at random into parts; each sample is in exactly one part.

    Args:
        dataset: the whole dataset.
        fractions: one number per part, at least 0. Only their proportions matter, so numbers of samples work too.
        seed: decides which sample is in which part.

    Returns:
        The parts. Each part's size differs from its fraction of the dataset by less than one sample.

    Raises:
        ConfigError: There are no fractions, one is negative or no number, or all are 0; `seed` is no int; or the
            dataset repeats documents, so that parts would share them.
    """
    check_types(random_split, locals())
    refuse_repeated(dataset)
    sizes = split_evenly(length_of(dataset), shares_of("fractions", fractions))
    ends = list(accumulate(sizes))
    return [RandomPart(dataset, int(seed), end - size, end) for size, end in zip(sizes, ends)]


def refuse_class(dataset: Any) -> None:
    """Raise a ConfigError if the user passed a class instead of an object of the class."""
    if isinstance(dataset, type):
        name = dataset.__name__
        raise ConfigError(f"dataset is the class {name}; pass an object of it, {name}(...), or LazyCall({name})(...)")


def length_of(dataset: Any) -> int:
    """The number of samples of a dataset. A ConfigError if it has no length, or is a mapping or a table, of which
    `table[index]` is a column, but a sample is expected; or a series of pandas whose labels are not 0, 1, 2, ..."""
    refuse_class(dataset)
    name = type(dataset).__name__
    for base in type(dataset).__mro__:
        rows = _ROWS_OF.get((base.__module__.partition(".")[0], base.__name__))
        is_series = base.__name__ == "Series"
        if rows is not None and not (is_series and np.array_equal(dataset.index, np.arange(len(dataset)))):
            what = "value by its label" if is_series else "column"
            raise ConfigError(f"dataset is a {name}, whose [index] is a {what}; pass its rows: {rows}")
    if isinstance(dataset, Mapping):
        raise ConfigError(
            f"dataset is a {name}, a mapping of {[*islice(dataset, 8)]!r:.100}; pass one dataset, such as one split"
        )
    try:
        return len(dataset)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"dataset is a {name}, whose len() raises {error_text(error)}; give it a __len__ that returns an int, 0 to "
            f"{sys.maxsize}, or read it as a stream, which needs no length: from_iterable, FilteredStream, PackedStream"
        ) from error


def indexed_length(dataset: Any) -> int:
    """`length_of` a dataset whose samples have indices; a ConfigError for a filter or packer."""
    refuse_outputs_without_indices(dataset)
    return length_of(dataset)


def check_index(index: int, length: int) -> None:
    """Raise an IndexError if an index is outside a dataset, and a TypeError if it is no int."""
    if not 0 <= operator.index(index) < length:
        raise IndexError(f"index {index} is outside a dataset of {length} samples (0 to {length - 1})")


def joint_read_batch(datasets: Sequence[Any], locate: Locate) -> Callable[..., None]:
    """A `read_batch` of several datasets, with the argument `parts` if the `read_batch` of all datasets has it.

    Args:
        datasets: each has `read_batch(indices, out)` or `read_batch(indices, out, parts)`, which reads its own rows;
            otherwise an AttributeError is raised.
        locate: indices -> numbers of the samples' datasets, and indices in these datasets; int64 [n] each.
    """
    for dataset in datasets:
        if batch_method_of(dataset, "read_batch") is None:
            raise AttributeError(f"{type(dataset).__name__} has no read_batch")

    def read(indices: np.ndarray, out: Rows, *parts: Parts) -> None:
        numbers, own = locate(np.asarray(indices, dtype=np.int64))
        for number in np.unique(numbers).tolist():
            rows = np.flatnonzero(numbers == number)
            with reading_some_of_them(rows):
                _read_rows(datasets[number], own[rows], out, rows, parts)

    def read_parts(indices: np.ndarray, out: Rows, parts: Parts) -> None:
        read(indices, out, parts)

    def read_whole(indices: np.ndarray, out: Rows) -> None:
        read(indices, out)

    return read_parts if all(_takes_parts(dataset) for dataset in datasets) else read_whole


def _takes_parts(dataset: Any) -> bool:
    return "parts" in inspect.signature(dataset.read_batch).parameters


def _read_rows(dataset: Any, indices: np.ndarray, out: Rows, rows: np.ndarray, parts: tuple[Parts, ...]) -> None:
    first, last = int(rows[0]), int(rows[-1])
    # A `read_batch` with the argument `parts` always gets the argument, even if it is empty.
    arguments: tuple[Parts, ...] = parts or (({},) if _takes_parts(dataset) else ())
    if last - first + 1 == len(rows):
        dataset.read_batch(indices, {name: array[first : last + 1] for name, array in out.items()}, *arguments)
        return
    # Rows that are not consecutive are no view of `out`, so they are read into separate arrays and copied. These have
    # the marks of `out`, which show the loader the rows that the dataset does not fill.
    apart: dict[str, np.ndarray] = {
        name: np.empty((len(rows), *array.shape[1:]), array.dtype) for name, array in out.items()
    }
    for name, array in out.items():
        for own, marks in zip(ends_of(apart[name]), ends_of(array)):
            own[...] = marks[rows]
    dataset.read_batch(indices, apart, *arguments)
    for name, array in apart.items():
        out[name][rows] = array
