"""Reading samples of several datasets together: each dataset reads its own rows of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Callable

import numpy as np

from libai_data.data.random.sample_random import reading_some_of_them

Rows = Mapping[str, np.ndarray]
Parts = Mapping[str, tuple[slice, ...]]
Locate = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def joint_read_batch(datasets: Sequence[Any], locate: Locate) -> Callable[..., None]:
    """A `read_batch` of several datasets.

    Args:
        datasets: whose `read_batch(indices, out)` or `read_batch(indices, out, parts)` is called with what is theirs.
        locate: indices -> numbers of the datasets that hold them, and indices in these; int64 [n] each.

    Returns:
        The function, which takes `parts` if all datasets do.

    Raises:
        AttributeError: One of the datasets has none, so that the property which asked for it is not there either.
    """
    for dataset in datasets:
        if not hasattr(dataset, "read_batch"):
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
    # Whoever takes parts is always told them.
    arguments: tuple[Parts, ...] = parts or (({},) if _takes_parts(dataset) else ())
    if last - first + 1 == len(rows):
        dataset.read_batch(indices, {name: array[first : last + 1] for name, array in out.items()}, *arguments)
        return
    # Rows that do not lie together have no array of their own.
    apart: dict[str, np.ndarray] = {
        name: np.empty((len(rows), *array.shape[1:]), array.dtype) for name, array in out.items()
    }
    dataset.read_batch(indices, apart, *arguments)
    for name, array in apart.items():
        out[name][rows] = array
