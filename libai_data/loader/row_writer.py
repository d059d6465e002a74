"""Writing samples into the rows of a batch, each field held against the schema."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Callable

import numpy as np

from libai_data.errors import SchemaError
from libai_data.loader.schema import FieldSpec, SampleSchema, array_of
from libai_data.structures import DistTensorData, check_field_names

Rows = Mapping[str, np.ndarray]
"""Field name -> writable array [rows, ...], the place of some samples within a batch."""

_OF_MEMORYVIEWS = "?bBhHiIlLqQfd"
"""dtypes of which memoryviews can be assigned to."""

_PLAIN = frozenset((np.ndarray, np.memmap))
"""Arrays without anything that a copy of their items would lose, such as a mask."""

RowWriter = Callable[[int, dict[str, Any]], None]
"""Copies one sample, given as its fields, into a row; raises SchemaError if the sample does not fit."""


def row_writer(schema: SampleSchema, rows: Rows) -> RowWriter:
    """Make what copies samples into rows of a batch."""
    # Flat, and in the form in which samples have it, since each field of each sample is held against it.
    vectors: list[Any] = []
    others: list[Any] = []
    for spec in schema.fields:
        target, layout = rows[spec.name], (list(spec.layout.sbp_list), spec.layout.placement_idx)
        if len(spec.shape) == 1 and spec.dtype.isnative and spec.dtype.char in _OF_MEMORYVIEWS:
            flat, places = target.reshape(-1).data, _places(spec.shape[0], len(target))
            vectors.append((spec.name, *layout, flat, places, spec))
        else:
            kinds = _PLAIN | {spec.dtype.type}
            others.append((spec.name, *layout, spec.dtype, spec.shape, kinds, target, spec))
    count = len(schema.fields)

    def write(row: int, fields: dict[str, Any]) -> None:
        if len(fields) != count:
            check_field_names(list(fields), schema.names, "the sample")
        try:
            for name, sbp_list, placement_idx, flat, places, spec in vectors:
                value = fields[name]
                if (
                    type(value) is DistTensorData
                    and value.placement_idx == placement_idx
                    and value.sbp_list == sbp_list
                ):
                    value = value.tensor
                if type(value) in _PLAIN:
                    try:
                        # A memoryview takes only what has its very type and length, and takes less time than numpy.
                        flat[places[row]] = value
                        continue
                    except (TypeError, ValueError, BufferError):
                        pass
                rows[name][row] = _checked(spec, fields[name])
            for name, sbp_list, placement_idx, dtype, shape, kinds, target, spec in others:
                value = fields[name]
                if (
                    type(value) is DistTensorData
                    and value.placement_idx == placement_idx
                    and value.sbp_list == sbp_list
                ):
                    value = value.tensor
                # Of numpy's own dtypes there is one object each, which is quicker to compare than what it is.
                if type(value) in kinds and value.dtype is dtype and value.shape == shape:
                    target[row] = value
                else:
                    target[row] = _checked(spec, fields[name])
        except KeyError:
            check_field_names(list(fields), schema.names, "the sample")
            raise

    return write


@lru_cache(maxsize=64)
def _places(length: int, rows: int) -> tuple[slice, ...]:
    """Where rows of this length lie in flat memory."""
    return tuple(slice(row * length, (row + 1) * length) for row in range(rows))


def _checked(spec: FieldSpec, value: Any) -> np.ndarray:
    """The array of a field whose form is not just that of the samples before it, if it can be taken for it."""
    layout = spec.layout
    if isinstance(value, DistTensorData) and (
        tuple(value.sbp_list) != layout.sbp_list or value.placement_idx != layout.placement_idx
    ):
        raise SchemaError(
            f"field '{spec.name}' is laid out as {value.sbp_list} on layer {value.placement_idx}, in the samples "
            f"before it as {list(layout.sbp_list)} on layer {layout.placement_idx}"
        )
    array = array_of(value, spec.name)
    if array.shape != spec.shape or array.dtype != spec.dtype:
        raise SchemaError(
            f"field '{spec.name}' is {array.dtype} {list(array.shape)}, in the samples before it "
            f"{spec.dtype} {list(spec.shape)}"
        )
    return array
