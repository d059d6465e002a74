"""The schema of a dataset's samples: learned from the first sample, and required of all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from libai_data.data.cached_property import cached_property
from libai_data.data.nesting import Skeleton
from libai_data.errors import ConfigError, SampleError, SchemaError
from libai_data.errors.argument_rules import MAPPING, check, or_none, refuse_unknown_keys
from libai_data.loader.default_collate import counts_in_words
from libai_data.loader.sample_form import SampleForm
from libai_data.loader.slots import ArraySpec, bytes_of, lay_out
from libai_data.mesh.arrays import as_array
from libai_data.mesh.global_tensor import split_dims
from libai_data.structures import DEFAULT_SBP, DistTensorData


@dataclass(frozen=True)
class Layout:
    """How a field is distributed over the mesh."""

    sbp_list: tuple[str, str] = DEFAULT_SBP  # signature over the (data, tensor) axes; see `DistTensorData`
    placement_idx: int = 0  # the layer whose pipeline stage holds the field

    def __post_init__(self) -> None:
        split_dims(self.sbp_list)
        object.__setattr__(self, "sbp_list", tuple(self.sbp_list))


@dataclass(frozen=True)
class TensorPart:
    """A rank's place on the tensor axis, for datasets that can read parts of samples."""

    rank: int
    size: int


@dataclass(frozen=True)
class FieldSpec:
    """One field of a sample, as a reader reads it."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]  # shape of what is read of a sample, without a batch dim
    layout: Layout
    part: tuple[slice, ...] | None = None  # the slice of each dim that is read; None if the whole field is read
    whole: tuple[int, ...] | None = None  # shape of the whole field; None if the whole field is read

    def describe(self) -> str:
        """Dtype, shape and, unless it is the default, layout, in words."""
        layout = (
            "" if self.layout == Layout() else f" {list(self.layout.sbp_list)} on layer {self.layout.placement_idx}"
        )
        return f"{self.dtype} {list(self.whole or self.shape)}{layout}"


@dataclass(frozen=True)
class SampleSchema:
    """The fields that every sample of a dataset has, in the order in which the first one names them."""

    fields: tuple[FieldSpec, ...]  # empty if samples contain text, because these are collated
    skeleton: Skeleton | None = None  # how batches are nested; None if samples are Instances or dicts of tensors
    has_text: bool = False  # samples contain strings

    def describe(self) -> str:
        """Fields, sorted by name, with dtypes, shapes and layouts that are not the default."""
        return "{" + ", ".join(sorted(f"{field.name}: {field.describe()}" for field in self.fields)) + "}"

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """Layout of each field."""
        return {spec.name: spec.layout for spec in self.fields}

    @cached_property
    def parts(self) -> dict[str, tuple[slice, ...]]:
        """Field name -> the slice of each dim that is read, for fields that are not read completely."""
        return {field.name: field.part for field in self.fields if field.part is not None}

    def for_tensor_part(self, place: TensorPart, layouts: Mapping[str, Mapping[str, Any]]) -> SampleSchema:
        """The schema of what one tensor-parallel rank needs: its part of each dim that the tensor axis splits."""
        return replace(self, fields=tuple(_part_of(field, place, layouts.get(field.name, {})) for field in self.fields))

    @property
    def names(self) -> list[str]:
        """Names of the fields."""
        return [spec.name for spec in self.fields]

    @cached_property
    def _batches(self) -> dict[int, tuple[tuple[ArraySpec, ...], int]]:
        return {}

    def laid_out(self, rows: int) -> tuple[tuple[ArraySpec, ...], int]:
        """Where the fields of a batch of `rows` samples are within a slot, and how many bytes they need."""
        if rows not in self._batches:
            specs = lay_out((spec.name, spec.dtype, (rows, *spec.shape)) for spec in self.fields)
            self._batches[rows] = specs, bytes_of(specs)
        return self._batches[rows]

    @staticmethod
    def of(sample: SampleForm) -> SampleSchema:
        """The schema of one sample."""
        fields = tuple(_spec(name, value) for name, value in sample.fields.items())
        if not fields and not sample.has_text:
            raise SchemaError("the sample has no fields; return an Instance with the arguments of model.forward")
        return SampleSchema(fields, sample.skeleton, sample.has_text)


class SchemaMismatch(SchemaError, SampleError):
    """A sample can be read, but has another schema than the first sample; no substitute may replace it.

    `counts` has the schemas of the samples that were looked at, as far as these can be read.
    """

    def __init__(
        self,
        dataset_name: str,
        index: int,
        problem: str,
        expected: str,
        counts: Mapping[str, int] | None = None,
        looked_at: int = 0,
    ) -> None:
        super().__init__(dataset_name, index, problem, expected, counts, looked_at)
        self.dataset_name, self.index, self.problem, self.expected = dataset_name, index, problem, expected
        self.counts, self.looked_at = dict(counts or {}), looked_at

    def with_counts(self, counts: Mapping[str, int], looked_at: int) -> SchemaMismatch:
        """The same error with the counts of more samples."""
        added = {schema: self.counts.get(schema, 0) + counts.get(schema, 0) for schema in {**self.counts, **counts}}
        return SchemaMismatch(
            self.dataset_name, self.index, self.problem, self.expected, added, self.looked_at + looked_at
        )

    def __str__(self) -> str:
        seen = counts_in_words({self.expected: 0, **self.counts})
        return (
            f"sample {self.index} of {self.dataset_name} has another schema than the first sample: {self.problem}. "
            f"Samples so far: {seen}. Only samples that cannot be read are replaced, so make all samples alike in the "
            "dataset (convert images to one mode and size, cast to one dtype, return the same fields), or use a "
            "padding collator, such as collate_fn=PadCollator(...)"
        )


def first_error(error: Exception | None, other: Exception | None) -> Exception | None:
    """Join the errors of two tasks of a batch: the first one, or one SchemaMismatch with the counts of both."""
    if isinstance(error, SchemaMismatch) and isinstance(other, SchemaMismatch):
        return error.with_counts(other.counts, other.looked_at)
    return error or other


def _part_of(field: FieldSpec, place: TensorPart, changes: Mapping[str, Any]) -> FieldSpec:
    _, split = split_dims(replace(field.layout, **changes).sbp_list)
    dim = -1 if split is None else split - 1
    # A dim that cannot be split evenly is read whole; `to_global` then raises an error that names the field.
    if dim < 0 or dim >= len(field.shape) or field.shape[dim] % place.size:
        return field
    length = field.shape[dim] // place.size
    own = slice(place.rank * length, (place.rank + 1) * length)
    part = tuple(own if other == dim else slice(0, size) for other, size in enumerate(field.shape))
    return replace(field, shape=tuple(each.stop - each.start for each in part), part=part, whole=field.shape)


def _spec(name: str, value: Any) -> FieldSpec:
    array = array_of(value, name)
    return FieldSpec(name, array.dtype, tuple(array.shape), layout_of(value, name))


def array_of(value: Any, name: str) -> np.ndarray:
    """The numpy array of a field, whether bare or wrapped in `DistTensorData`."""
    return as_array(value.tensor if isinstance(value, DistTensorData) else value, name)


def layout_of(value: Any, name: str) -> Layout:
    """The layout of a field; bare values get the default layout."""
    if not isinstance(value, DistTensorData):
        return Layout()
    try:
        return Layout(tuple(value.sbp_list), value.placement_idx)  # type: ignore[arg-type]
    except SchemaError as error:
        raise SchemaError(f"field '{name}': {error}") from error


def own_parts(schema: SampleSchema, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Cut the parts that the schema reads out of a whole sample."""
    parts = schema.parts
    return {name: array_of(value, name)[parts[name]] if name in parts else value for name, value in fields.items()}


Overrides = Mapping[str, Mapping[str, Any]]


def parse_layouts(layouts: Overrides | None) -> dict[str, dict[str, Any]]:
    """The layouts that a config sets by field name, with tuples for lists; a ConfigError names a wrong field and key.

    Each is {"sbp_list": [...], "placement_idx": int}; either key may be left out.
    """
    parsed: dict[str, dict[str, Any]] = {}
    check({"layouts": or_none(MAPPING)}, layouts=layouts)
    for name, layout in (layouts or {}).items():
        check({f"layouts.{name}": MAPPING}, **{f"layouts.{name}": layout})
        refuse_unknown_keys(f"layouts.{name}", layout, ("sbp_list", "placement_idx"))
        changes = dict(layout)
        if isinstance(changes.get("sbp_list"), Sequence) and not isinstance(changes["sbp_list"], str):
            changes["sbp_list"] = tuple(changes["sbp_list"])
        if not isinstance(changes.get("placement_idx", 0), int):
            raise ConfigError(f"layouts.{name}.placement_idx is {changes['placement_idx']!r}; it must be an int")
        try:
            Layout(**changes)
        except SchemaError as error:
            raise ConfigError(f"layouts.{name}: {error}") from error
        parsed[name] = changes
    return parsed
