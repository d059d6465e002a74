"""Writing samples into the rows of a batch: by fields that are compared with the schema, or by `read_batch`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from operator import is_
from typing import Any, Callable

import numpy as np
from numpy.lib.stride_tricks import as_strided

from libai_data.data.cached_property import cached_property
from libai_data.data.items import ends_of
from libai_data.errors import SchemaError
from libai_data.loader.schema import FieldSpec, SampleSchema, array_of
from libai_data.structures import DistTensorData, check_field_names

_OF_MEMORYVIEWS = "?bBhHiIlLqQfd"
"""Codes of the dtypes for which memoryviews support assignment."""

_PLAIN = frozenset((np.ndarray, np.memmap))
"""Classes of arrays that have only items, and nothing that copying the items would lose, such as a mask."""

RowWriter = Callable[[int, dict[str, Any]], None]
"""Copies one sample, given as its fields, into a row; raises SchemaError if the sample does not fit."""


class Rows(dict[str, np.ndarray]):
    """Field name -> writable array [rows, ...], the rows of some samples within a batch.

    Args:
        schema: schema of the samples.
        arrays: field name -> array [rows, ...].
    """

    def __init__(self, schema: SampleSchema, arrays: Mapping[str, np.ndarray]) -> None:
        super().__init__(arrays)
        self.schema = schema

    def of(self, rows: slice) -> Rows:
        """Some of these rows."""
        return Rows(self.schema, {name: array[rows] for name, array in self.items()})

    @cached_property
    def write(self) -> RowWriter:
        """The function that copies samples into these rows."""
        return _row_writer(self.schema, dict(self))

    @cached_property
    def ends(self) -> list[tuple[str, np.ndarray, int]]:
        """For each field, `ends_of` its rows, and the number that, times a byte, has this byte in each of its bytes."""
        ends = ((name, words) for name, array in self.items() for words in ends_of(array))
        return [(name, words, int.from_bytes(b"\1" * words.itemsize, "little")) for name, words in ends]

    @cached_property
    def last_ends(self) -> list[tuple[str, np.ndarray, int]]:
        """Of each field, the last of its `ends`, if they have so many bytes that data hardly ever equals a mark."""
        return [end for end in {end[0]: end for end in self.ends}.values() if end[1].itemsize >= _SURE]

    @cached_property
    def joined_last_ends(self) -> list[tuple[np.ndarray, int]]:
        """`last_ends` without names; one view of all fields, [fields, rows], if they are at equal distances."""
        places = [words.__array_interface__["data"][0] for _, words, _ in self.last_ends]
        distances = {second - first for first, second in zip(places, places[1:])}
        if len(distances) != 1 or len({(words.dtype, words.strides) for _, words, _ in self.last_ends}) != 1:
            return [(words, ones) for _, words, ones in self.last_ends]
        _, first, ones = self.last_ends[0]
        return [(as_strided(first, (len(places), len(first)), (*distances, *first.strides)), ones)]


def _row_writer(schema: SampleSchema, rows: dict[str, np.ndarray]) -> RowWriter:
    # Flat tuples, with values in the form that samples have, because each field of each sample is compared with them.
    vectors: list[Any] = []
    others: list[Any] = []
    for spec in schema.fields:
        target, layout = rows[spec.name], (list(spec.layout.sbp_list), spec.layout.placement_idx)
        if len(spec.shape) == 1 and spec.dtype.isnative and spec.dtype.char in _OF_MEMORYVIEWS:
            flat, places = target.reshape(-1).data, _places(spec.shape[0], len(target))
            vectors.append((spec.name, flat, places, (*layout, spec)))
        else:
            kinds = _PLAIN | {spec.dtype.type}
            others.append((spec.name, *layout, spec.dtype, spec.shape, kinds, target, spec))
    count, np_array = len(schema.fields), np.ndarray

    def write(row: int, fields: dict[str, Any]) -> None:
        if len(fields) != count:
            check_field_names(list(fields), schema.names, "the sample")
        try:
            for name, flat, places, form in vectors:
                value = fields[name]
                if type(value) is not np_array:  # For a dict of arrays, this check is sufficient.
                    sbp_list, placement_idx, _ = form
                    if (
                        type(value) is DistTensorData
                        and value.placement_idx == placement_idx
                        and value.sbp_list == sbp_list
                    ):
                        value = value.tensor
                    if type(value) not in _PLAIN:
                        value = None
                try:
                    # A memoryview accepts only values of the same dtype and length, and is faster than numpy.
                    flat[places[row]] = value
                except (TypeError, ValueError, BufferError):
                    rows[name][row] = _checked(form[-1], fields[name])
            for name, sbp_list, placement_idx, dtype, shape, kinds, target, spec in others:
                value = fields[name]
                if (
                    type(value) is DistTensorData
                    and value.placement_idx == placement_idx
                    and value.sbp_list == sbp_list
                ):
                    value = value.tensor
                # Each of numpy's own dtypes is one object, and comparing objects is faster than comparing dtypes.
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
    """Where rows of this length are in flat memory."""
    return tuple(slice(row * length, (row + 1) * length) for row in range(rows))


def _checked(spec: FieldSpec, value: Any) -> np.ndarray:
    """Convert a field that failed the fast checks; raises SchemaError if layout, shape or dtype differs."""
    layout = spec.layout
    if isinstance(value, DistTensorData) and (
        tuple(value.sbp_list) != layout.sbp_list or value.placement_idx != layout.placement_idx
    ):
        raise SchemaError(
            f"field '{spec.name}' is laid out as {value.sbp_list} on layer {value.placement_idx}, but in the samples "
            f"before it as {list(layout.sbp_list)} on layer {layout.placement_idx}"
        )
    array = array_of(value, spec.name)
    if array.shape != spec.shape or array.dtype != spec.dtype:
        raise SchemaError(
            f"field '{spec.name}' is {array.dtype} {list(array.shape)}, but in the samples before it {spec.dtype} "
            f"{list(spec.shape)}"
        )
    return array


_SURE = 4
"""Number of bytes of a mark that data hardly ever equals."""
_MARKS = 0xA5, 0x5A
_MARKED = {width: bytes(_MARKS[:1]) * width for width in (1, _SURE)}


class BatchFiller:
    """Calls `read_batch`, and raises an error if it does not fill a row: the row would still contain an old batch.

    Before each call, the ends of the rows are marked: both ends before the first call, and the last one afterwards. If
    a mark is left, it may be data of the dataset. Then a second call decides, with other arrays and another mark.

    Args:
        reads_parts: whether `read_batch` has an argument `parts`.
    """

    def __init__(self, read_batch: Callable[..., Any], reads_parts: bool) -> None:
        self._read_batch = read_batch
        self._reads_parts = reads_parts
        self._has_filled = False

    def __call__(self, indices: np.ndarray, out: Rows) -> None:
        """Fill `out`.

        Raises:
            SchemaError: `read_batch` replaced an array of `out`, or did not fill a row.
        """
        # Joined views are filled and searched by fewer calls, which cost more than reading a batch of tokens.
        ends, width = (out.joined_last_ends, _SURE) if self._has_filled else ([end[1:] for end in out.ends], 1)
        for words, ones in ends:
            words.fill(_MARKS[0] * ones)
        self._fill(indices, out)
        mark = _MARKED[width]
        for words, _ in ends:
            if mark in words.tobytes():  # Faster than to compare each word.
                self._check_marked(indices, out)
                break
        self._has_filled = True

    def _fill(self, indices: np.ndarray, out: Rows) -> None:
        given = dict(out)
        self._read_batch(indices.copy(), given, *([out.schema.parts] if self._reads_parts else ()))
        if len(given) != len(out) or not all(map(is_, given.values(), out.values())):
            for name, array in given.items():
                if array is not out.get(name):
                    raise SchemaError(
                        f"read_batch assigns a new array to out[{name!r}]; fill the array that is there instead: "
                        f"out[{name!r}][...] = ... (out has {list(out)})"
                    )

    def _check_marked(self, indices: np.ndarray, out: Rows) -> None:
        """Raise an error if marks are left that another call, with other arrays and another mark, leaves, too."""
        left = self._marked_rows(out, _MARKS[0])
        if left:
            others = Rows(out.schema, {name: np.empty_like(array) for name, array in out.items()})
            for _, words, ones in others.ends:
                words.fill(_MARKS[1] * ones)
            self._fill(indices, others)
            left &= self._marked_rows(others, _MARKS[1])
        for name, row in sorted(left):
            raise SchemaError(
                f"read_batch did not fill row {row} of out['{name}']; it must fill each row completely: "
                f"out['{name}'][...] = ..."
            )

    def _marked_rows(self, out: Rows, mark: int) -> set[tuple[str, int]]:
        ends = out.last_ends if self._has_filled else out.ends
        return {
            (name, row) for name, words, ones in ends for row, word in enumerate(words.tolist()) if word == mark * ones
        }
