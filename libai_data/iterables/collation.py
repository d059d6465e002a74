"""From samples to a batch as PyTorch's users know it: types are kept, and what is nested is recursed into."""

from __future__ import annotations

import dataclasses
from collections import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from libai_data.data.nesting import TEXT, is_named_tuple, is_numbers, text_to_array
from libai_data.errors import SchemaError
from libai_data.iterables.items import array_in, as_leaf, leaves_of_batch, named
from libai_data.structures import DistTensorData, Instance, stack_tensors


def default_collate(samples: Sequence[Any], path: str = "") -> Any:
    """Make a batch of samples.

    Tensors and numbers are stacked along a new dim 0. Mappings, named tuples, dataclasses, Instances, tuples and lists
    stay what they are, with a batch of each of their values; strings become a list. A list of numbers is a tensor.

    Args:
        samples: at least one; all alike.
        path: of the samples within a field, named in errors.

    Raises:
        SchemaError: Samples differ, or a value has a type that cannot be collated; its path is named.
    """
    first = samples[0]
    for row, sample in enumerate(samples):
        if _form(sample) != _form(first):
            raise SchemaError(f"{_whose(path)}sample 0 of a batch is {_form(first)}, sample {row} is {_form(sample)}")
    if isinstance(first, Instance):
        return Instance(**_by_key(samples, [sample.get_fields() for sample in samples], path))
    if isinstance(first, abc.Mapping):
        batch = _by_key(samples, samples, path)
        try:
            return type(first)(batch)  # type: ignore[call-arg]
        except TypeError:  # Its constructor takes something else.
            return batch
    if is_named_tuple(first):
        return type(first)(*_by_key(samples, [sample._asdict() for sample in samples], path).values())
    if dataclasses.is_dataclass(first) and not isinstance(first, (type, DistTensorData)):
        names = [field.name for field in dataclasses.fields(first)]
        fields = [{name: getattr(sample, name) for name in names} for sample in samples]
        return dataclasses.replace(first, **_by_key(samples, fields, path))
    if isinstance(first, TEXT):
        return list(samples)
    if isinstance(first, (list, tuple)) and not is_numbers(first):
        if any(len(sample) != len(first) for sample in samples):
            raise SchemaError(f"{_whose(path)}sequences of unequal lengths: {[len(sample) for sample in samples]}")
        parts = [default_collate(each, f"{path}.{number}".lstrip(".")) for number, each in enumerate(zip(*samples))]
        return parts if isinstance(first, list) else tuple(parts)
    leaves = [as_leaf(sample, path) for sample in samples]
    try:
        return DistTensorData.stack(leaves) if isinstance(first, DistTensorData) else stack_tensors(leaves)
    except SchemaError as error:
        raise SchemaError(f"{_whose(path)}{error}") from error


def _form(sample: Any) -> str:
    """What samples of a batch must have in common before their values are compared."""
    if isinstance(sample, (bool, int, float, np.generic)):
        return "a number"
    return f"a {type(sample).__name__}"


def _whose(path: str) -> str:
    return f"field '{path}': " if path else ""


def _by_key(samples: Sequence[Any], fields: Sequence[Any], path: str) -> dict[str, Any]:
    first = fields[0]
    for row, each in enumerate(fields):
        if set(each) != set(first):
            raise SchemaError(f"{_whose(path)}sample 0 of a batch has {list(first)}, sample {row} has {list(each)}")
    return {key: default_collate([each[key] for each in fields], f"{path}.{key}".lstrip(".")) for key in first}


class BatchRow(NamedTuple):
    """A row of a batch that the iterable made.

    Args:
        leaves: path -> array or `DistTensorData` [rows, ...], or list of strings.
        skeleton: of the batch.
        row: which one.
    """

    leaves: dict[str, Any]
    skeleton: dict[str, Any]
    row: int


class PieceCollator:
    """The collator of a loader over an iterable: makes flat batches of samples, or of rows of other batches.

    Args:
        names: of the fields; see `named`.
        collate_fn: makes a batch of samples as they come; by default `default_collate`.

    Attributes:
        names: as given.
        skeleton: of the first batch; None before it.
    """

    def __init__(self, names: Sequence[str] | None, collate_fn: Any | None = None) -> None:
        self.names = names
        self._collate_fn = collate_fn
        self.skeleton: dict[str, Any] | None = None

    def __call__(self, pieces: Sequence[Any]) -> dict[str, Any]:
        """Make a batch, path -> array [rows, ...]; strings are packed into arrays too.

        Raises:
            SchemaError: Pieces differ, or the batch is nested in another way than the one before.
        """
        leaves: dict[str, Any] = {}
        if isinstance(pieces[0], BatchRow):
            skeleton = pieces[0].skeleton
            leaves = _joined(pieces)
        elif self._collate_fn is not None:
            skeleton = leaves_of_batch(named(self._collate_fn(list(pieces)), self.names), leaves)
        else:
            skeleton = leaves_of_batch(default_collate([named(piece, self.names) for piece in pieces]), leaves)
        if self.skeleton is None:
            self.skeleton = skeleton
        if skeleton != self.skeleton:
            raise SchemaError(f"a batch is nested as {skeleton}, the one before it as {self.skeleton}")
        return {path: text_to_array(value) if isinstance(value, list) else value for path, value in leaves.items()}


def _joined(pieces: Sequence[BatchRow]) -> dict[str, Any]:
    """Rows of batches as one batch; a view where they lie one behind the other in one."""
    runs: list[list[BatchRow]] = []
    for piece in pieces:
        if runs and runs[-1][-1].leaves is piece.leaves and runs[-1][-1].row + 1 == piece.row:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    first = pieces[0]
    for piece in pieces:
        if piece.skeleton is not first.skeleton and piece.skeleton != first.skeleton:
            raise SchemaError(f"a batch has {list(piece.leaves)}, the one before it {list(first.leaves)}")
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
            f"field '{path}': rows of batches of different shapes cannot be put together: {found}; let the iterable "
            "yield batches of the size of a global batch, without a short one at the end of a round, or pad to one "
            "length"
        )
    return np.concatenate(parts)
