"""What `read_batch` of a dataset does to the arrays that it is to fill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable

import numpy as np

from libai_data.errors import SchemaError

_MARKS = 0xA5, 0x5A


class BatchFiller:
    """Calls `read_batch`, and refuses one that leaves rows as they were: they hold an old batch.

    Rows are marked before the first call. If a mark is left, it may be what the dataset has there; another call, into
    other arrays with another mark, shows it.
    """

    def __init__(self, read_batch: Callable[..., Any]) -> None:
        self._read_batch = read_batch
        self._is_known_to_fill = False

    def __call__(self, indices: np.ndarray, out: Mapping[str, np.ndarray], *parts: Any) -> None:
        """Fill `out`.

        Raises:
            SchemaError: Another array took the place of one, or rows were left as they were.
        """
        if self._is_known_to_fill:
            self._fill(indices, out, *parts)
            return
        left = self._left_by(_MARKS[0], indices, out, *parts)
        if left:
            others = {name: np.empty_like(array) for name, array in out.items()}
            left &= self._left_by(_MARKS[1], indices, others, *parts)
        for name, row in sorted(left):
            raise SchemaError(
                f"read_batch leaves out['{name}'] as it was in row {row}; it must fill each row: "
                f"out['{name}'][...] = ..."
            )
        self._is_known_to_fill = True

    def _left_by(
        self, mark: int, indices: np.ndarray, out: Mapping[str, np.ndarray], *parts: Any
    ) -> set[tuple[str, int]]:
        rows = {
            name: array.reshape(len(array), -1).view(np.uint8)
            for name, array in out.items()
            if array.size and array.flags.c_contiguous
        }
        for marked in rows.values():
            marked[...] = mark
        self._fill(indices, out, *parts)
        return {(name, int(row)) for name, marked in rows.items() for row in np.flatnonzero((marked == mark).all(1))}

    def _fill(self, indices: np.ndarray, out: Mapping[str, np.ndarray], *parts: Any) -> None:
        given = dict(out)
        self._read_batch(indices.copy(), given, *parts)
        for name, array in given.items():
            if array is not out.get(name):
                raise SchemaError(
                    f"read_batch sets out[{name!r}], instead of filling the array that is there: "
                    f"out[{name!r}][...] = ... (out has {list(out)})"
                )
