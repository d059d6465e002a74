"""The collator of a loader over an iterable: for samples, or for rows of batches that the iterable yielded."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from libai_data.data.attributes import attribute_of
from libai_data.data.items import array_in, named, rows_in
from libai_data.data.nesting import is_named_tuple, put_together
from libai_data.errors import SchemaError
from libai_data.loader.collate import is_own
from libai_data.loader.default_collate import default_collate
from libai_data.mesh.arrays import is_flow_tensor
from libai_data.structures import DistTensorData, Instance


class BatchRow(NamedTuple):
    """A row of a batch that the iterable yielded."""

    leaves: dict[str, Any]  # path -> array or `DistTensorData` [rows, ...], or list of strings
    skeleton: dict[str, Any]
    row: int


def is_whole_batch(first: BatchRow, last: BatchRow, count: int) -> bool:
    """Whether `count` rows from `first` to `last` are all rows of one batch that the iterable yielded."""
    return first.leaves is last.leaves and count == rows_in(first.leaves)


class PieceCollator:
    """Collates samples, by default with `default_collate`, or joins rows of batches that the iterable yielded."""

    def __init__(self, names: Sequence[str] | None, collate_fn: Any | None = None) -> None:
        self.names = names
        self._collate_fn = collate_fn or default_collate
        self.is_own = is_own(collate_fn)
        self.__name__ = attribute_of(self._collate_fn, "__name__", type(collate_fn).__name__)  # for error messages

    def __call__(self, pieces: Sequence[Any]) -> dict[str, Any]:
        """Make a batch, name -> value, nested like the samples; a SchemaError if these differ."""
        first = pieces[0]
        if isinstance(first, BatchRow):
            joined = _joined(pieces)
            return put_together(first.skeleton, lambda leaf: joined[leaf.path])
        if self.is_own:
            return named(self._collate_fn([named(piece, self.names) for piece in pieces]))
        # Copies: a collator that draws is called again, a last row is repeated, and a collator may change samples.
        return named(self._collate_fn([_copied(piece) for piece in pieces]), self.names)


def _copied(value: Any) -> Any:
    """A sample whose containers and arrays are copies; other objects are shared."""
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    if is_named_tuple(value):
        return value._make(map(_copied, value))
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if isinstance(value, Instance):
        other = copy.copy(value)
        for name, each in value.get_fields().items():
            other.set(name, _copied(each))
        return other
    if isinstance(value, DistTensorData):
        return value.with_tensor(_copied(value.tensor))
    if isinstance(value, np.ndarray):
        return value.copy()
    is_tensor = is_flow_tensor(value) or (hasattr(value, "__array__") and hasattr(value, "clone"))  # the second: torch
    return value.clone() if is_tensor else value


def _joined(pieces: Sequence[BatchRow]) -> dict[str, Any]:
    """Join rows of batches; the result has views if all rows are consecutive rows of one batch."""
    runs: list[list[BatchRow]] = []
    for piece in pieces:
        if runs and runs[-1][-1].leaves is piece.leaves and runs[-1][-1].row + 1 == piece.row:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    first = pieces[0]
    for piece in pieces:
        if piece.skeleton is not first.skeleton and piece.skeleton != first.skeleton:
            raise SchemaError(
                f"a batch has the fields {list(piece.leaves)}, but the batch before it has {list(first.leaves)}"
            )
    joined: dict[str, Any] = {}
    for path, value in first.leaves.items():
        parts = [array_in(run[0].leaves[path])[run[0].row : run[-1].row + 1] for run in runs]
        whole = parts[0] if len(parts) == 1 else _concatenated(parts, path)
        if isinstance(value, DistTensorData):
            whole = DistTensorData(whole, value.sbp_list, value.placement_idx)
        joined[path] = whole
    return joined


def _concatenated(parts: list[Any], path: str) -> Any:
    if isinstance(parts[0], list):
        return [text for part in parts for text in part]
    if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
        found = [f"{part.dtype} {list(part.shape)}" for part in parts]
        raise SchemaError(
            f"field '{path}': rows of batches of different shapes cannot be joined: {found}. Let the iterable yield "
            "batches of the size of a global batch, without a short last batch, or pad to one length"
        )
    return np.concatenate(parts)
