"""From samples to a batch, as in PyTorch: types are kept, and nested values are collated value by value."""

from __future__ import annotations

from collections import Counter, abc
from collections.abc import Sequence
from typing import Any

import numpy as np

from libai_data.data.items import array_in, as_leaf, leaves_of
from libai_data.data.nesting import (
    TEXT,
    fields_of_dataclass,
    is_dataclass,
    is_named_tuple,
    is_numbers,
    is_texts,
)
from libai_data.errors import SchemaError
from libai_data.mesh.arrays import stack_tensors
from libai_data.structures import DistTensorData, Instance

_MOST_SCHEMAS_SHOWN = 8


def default_collate(samples: Sequence[Any], path: str = "") -> Any:
    """Make a batch of samples.

    Tensors and numbers are stacked along a new dim 0. Mappings, named tuples, dataclasses, Instances, tuples and lists
    keep their type, and each of their values becomes a batch. Strings become a list. A list of numbers is a tensor.

    Args:
        samples: at least one; all of the same types, fields, shapes and dtypes.
        path: where the samples are within a field; errors name the path.

    Raises:
        SchemaError: Samples differ, or a value has a type that cannot be collated. The message names the path, and
            says how many samples have which schema.
    """
    try:
        return _collated(samples, path)
    except SchemaError as error:
        counts = Counter(map(_schema_in_words, samples))
        if len(counts) == 1:
            raise
        seen = counts_in_words(dict(counts.most_common()))
        raise SchemaError(
            f"{error}. Samples of this batch: {seen}. Make all samples alike (one mode and size of images, one dtype, "
            "the same fields), or make the batch in a collate_fn"
        ) from error


def counts_in_words(counts: abc.Mapping[str, int]) -> str:
    """How many samples have which schema, in words; of many schemas, only the first ones."""
    seen = ", ".join(f"{count} of {schema}" for schema, count in list(counts.items())[:_MOST_SCHEMAS_SHOWN])
    return f"{seen}, and others" if len(counts) > _MOST_SCHEMAS_SHOWN else seen


def _schema_in_words(sample: Any) -> str:
    try:
        kinds = sorted(f"{path}: {_kind_of(leaf, path)}" for path, leaf in leaves_of(sample).items())
        return "{" + ", ".join(kinds) + "}"
    except SchemaError as error:
        return f"({error})"


def _kind_of(leaf: Any, path: str) -> str:
    if isinstance(leaf, TEXT) or is_texts(leaf):
        return "text"
    array = array_in(as_leaf(leaf, path))
    return f"{array.dtype} {list(array.shape)}"


def _collated(samples: Sequence[Any], path: str) -> Any:
    first = samples[0]
    for row, sample in enumerate(samples):
        if _form(sample) != _form(first):
            raise SchemaError(f"{_whose(path)}sample 0 of a batch is {_form(first)}, sample {row} is {_form(sample)}")
    if isinstance(first, Instance):
        return Instance(**_by_key([sample.get_fields() for sample in samples], path))
    if isinstance(first, abc.Mapping):
        batch = _by_key(samples, path)
        if isinstance(first, dict) and type(first).__getitem__ is not dict.__getitem__:
            return batch  # It may decode values when they are asked for, and would decode those of the batch again.
        try:
            return type(first)(batch)  # type: ignore[call-arg]
        except TypeError:  # Its constructor needs other arguments.
            return batch
    if is_named_tuple(first):
        return first._make(_by_key([sample._asdict() for sample in samples], path).values())
    if is_dataclass(first):
        whole = object.__new__(type(first))  # Its own constructor would check or change the values a second time.
        for name, value in _by_key([*map(fields_of_dataclass, samples)], path).items():
            object.__setattr__(whole, name, value)
        return whole
    if isinstance(first, TEXT):
        return list(samples)
    if isinstance(first, (list, tuple)) and not is_numbers(first):
        if any(len(sample) != len(first) for sample in samples):
            raise SchemaError(
                f"{_whose(path)}sequences of unequal lengths: {[len(sample) for sample in samples]}; make the batch in "
                "a collate_fn, or select other fields with fields=[...]"
            )
        parts = [_collated(each, f"{path}.{number}".lstrip(".")) for number, each in enumerate(zip(*samples))]
        return parts if isinstance(first, list) else tuple(parts)
    leaves = [as_leaf(sample, path) for sample in samples]
    try:
        return DistTensorData.stack(leaves) if isinstance(first, DistTensorData) else stack_tensors(leaves)
    except SchemaError as error:
        raise SchemaError(f"{_whose(path)}{error}") from error


def _form(sample: Any) -> str:
    """The type of a sample, in words; it must be the same for all samples of a batch."""
    if isinstance(sample, TEXT):
        return "a str" if isinstance(sample, str) else "a bytes"
    if isinstance(sample, (bool, int, float, np.generic)):
        return "a number"
    return f"a {type(sample).__name__}"


def _whose(path: str) -> str:
    return f"field '{path}': " if path else ""


def _by_key(fields: Sequence[Any], path: str) -> dict[str, Any]:
    first = fields[0]
    for row, each in enumerate(fields):
        if set(each) != set(first):
            raise SchemaError(f"{_whose(path)}sample 0 of a batch has {list(first)}, sample {row} has {list(each)}")
    return {key: _collated([each[key] for each in fields], f"{path}.{key}".lstrip(".")) for key in first}
