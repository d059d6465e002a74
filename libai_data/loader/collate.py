"""Collators: from a list of samples to a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Callable

import numpy as np

from libai_data.data.items import named
from libai_data.data.nesting import TEXT, TupleFields, is_texts, put_together, taken_apart
from libai_data.errors import ConfigError, SchemaError, nearest
from libai_data.errors.argument_rules import FLAG, MAPPING, Rule, check, one_of, or_none, refuse_unknown_keys, whole
from libai_data.loader.default_collate import default_collate
from libai_data.mesh.arrays import as_array, check_padding
from libai_data.structures import DistTensorData, Instance, check_field_names

Collator = Callable[[list[Any]], Any]

_RULES = {
    "value": Rule("a number or a bool", lambda value: isinstance(value, (bool, np.bool_, Real))),
    "side": one_of("right", "left"),
    "multiple": whole(1),
    "max_length": or_none(whole(1)),
    "truncate": FLAG,
    "fixed": FLAG,
}


def trivial_batch_collator(batch: list[Instance]) -> Instance:
    """Stack Instances field by field along a new batch dim.

    The loader does not call this collator: it writes samples directly into their rows of the batch.

    Args:
        batch: the samples.

    Returns:
        One Instance whose fields have shape [len(batch), ...].

    Raises:
        SchemaError: An item is no Instance, or fields, shapes, dtypes or layouts differ.
    """
    for row, sample in enumerate(batch):
        if not isinstance(sample, Instance):
            raise SchemaError(
                f"sample {row} of the batch is a {type(sample).__name__}; trivial_batch_collator stacks Instances, "
                "so return Instance(field=DistTensorData(tensor), ...) from the dataset or pass another collate_fn"
            )
    return Instance.stack(batch)


@dataclass(frozen=True)
class Padding:
    """How a ragged field is padded along its first dim (the sequence).

    Args:
        value: the value to pad with.
        side: where to pad, "right" or "left".
        multiple: lengths are rounded up to a multiple of this number.
        max_length: the longest sample allowed.
        truncate: cut longer samples to `max_length` (on the side that is padded) instead of raising an error.
        fixed: always pad to `max_length`, instead of to the longest sample of the batch. Data-parallel ranks need it,
            because each rank sees only its own samples.

    Raises:
        ConfigError: A value is out of range, or `truncate` or `fixed` is set without `max_length`.
    """

    value: int | float | bool = 0
    side: str = "right"
    multiple: int = 1
    max_length: int | None = None
    truncate: bool = False
    fixed: bool = False

    def __post_init__(self) -> None:
        check(_RULES, **{name: getattr(self, name) for name in _RULES})
        if self.max_length is None and (self.truncate or self.fixed):
            raise ConfigError("truncate and fixed need max_length, the length to cut or pad to")
        if self.max_length is not None and self.max_length % self.multiple:
            raise ConfigError(f"max_length is {self.max_length}, which is not a multiple of {self.multiple}")

    def length_for(self, longest: int) -> int:
        """The padded length of a batch whose longest sample has the length `longest`."""
        if self.fixed and self.max_length is not None:
            return self.max_length
        return -(-longest // self.multiple) * self.multiple


class PadCollator:
    """Pads the named fields of samples, and stacks the samples. All other tensors must have equal shapes. Strings
    become lists, and nested values are collated value by value, as in `default_collate`.

    Args:
        fields: field name -> `Padding`, or a mapping of its arguments. A nested field is named `outer.inner`.

    Raises:
        ConfigError: An argument of a padding is unknown or out of range; the message names the field.
    """

    def __init__(self, fields: Mapping[str, Padding | Mapping[str, Any]]) -> None:
        check({"fields": MAPPING}, fields=fields)
        self.fields = {name: _padding(name, padding) for name, padding in fields.items()}

    def __call__(self, batch: list[Any]) -> Instance:
        """Make a batch.

        Args:
            batch: Instances, dicts, tuples or dataclasses with the same fields.

        Returns:
            One Instance; the layout of each field is that of the first sample.

        Raises:
            SchemaError: Fields or shapes differ, a field is too long, or its dtype cannot hold the padding value.
        """
        skeletons, samples = [], []
        for sample in batch:
            leaves: dict[str, Any] = {}
            skeletons.append(taken_apart(named(sample), leaves))
            is_text = {path: isinstance(value, TEXT) or is_texts(value) for path, value in leaves.items()}
            samples.append({path: value if is_text[path] else _wrapped(value, path) for path, value in leaves.items()})
            check_field_names(list(skeletons[-1]), list(skeletons[0]), f"sample {len(samples) - 1} of a batch")
        for name, padding in self.fields.items():
            for row, sample in enumerate(samples):
                if name not in sample:
                    raise SchemaError(
                        f"padding is set for '{name}', but sample {row} has the fields "
                        f"{list(sample)}.{nearest(name, sample)}"
                    )
                if not isinstance(sample[name], DistTensorData):
                    raise SchemaError(
                        f"padding is set for '{name}', but this field of sample {row} is text; pad tensors only"
                    )
            arrays = [_cut(as_array(sample[name].tensor, name), padding, name) for sample in samples]
            # An empty list becomes float32, whatever the lists of the other samples are.
            dtype = next((array.dtype for array in arrays if array.size), arrays[0].dtype)
            arrays = [array.astype(dtype) if array.shape == (0,) else array for array in arrays]
            length = padding.length_for(max(len(array) for array in arrays))
            for dtype in {array.dtype for array in arrays}:
                check_padding(name, dtype, padding.value)
            for sample, array in zip(samples, arrays):
                padded = _padded(array, length, padding)
                sample[name] = DistTensorData(padded, sample[name].sbp_list, sample[name].placement_idx)
        made = Instance(**default_collate([_nested(*parts) for parts in zip(skeletons, samples)]))
        made._is_tuple = isinstance(skeletons[0], TupleFields)
        return made


def is_own(collator: Collator | None) -> bool:
    """Whether this package makes the batches: nothing draws, changes samples or overwrites a batch later."""
    is_known = collator is None or collator is default_collate or type(collator) is PadCollator
    return is_known or getattr(collator, "is_own", False)


def _nested(skeleton: Any, leaves: Mapping[str, Any]) -> Any:
    return put_together(skeleton, lambda leaf: leaves[leaf.path])


def _padding(name: str, padding: Padding | Mapping[str, Any]) -> Padding:
    if isinstance(padding, Padding):
        return padding
    if not isinstance(padding, Mapping):
        raise ConfigError(
            f"padding of '{name}' is {padding!r}; it must be a Padding, or a mapping of its arguments, such as "
            "{'value': 0}"
        )
    refuse_unknown_keys(f"padding of '{name}'", padding, list(Padding.__dataclass_fields__))
    try:
        return Padding(**padding)
    except ConfigError as error:
        raise ConfigError(f"padding of '{name}': {error}") from error


def _wrapped(value: Any, name: str) -> DistTensorData:
    return value if isinstance(value, DistTensorData) else DistTensorData(as_array(value, name))


def _cut(array: np.ndarray, padding: Padding, name: str) -> np.ndarray:
    if array.ndim == 0:
        raise SchemaError(f"field '{name}' is a single number, which cannot be padded")
    if padding.max_length is None or len(array) <= padding.max_length:
        return array
    if not padding.truncate:
        raise SchemaError(
            f"field '{name}' has length {len(array)}, more than max_length {padding.max_length}; raise it, or set "
            "truncate=True to cut"
        )
    return array[: padding.max_length] if padding.side == "right" else array[-padding.max_length :]


def _padded(array: np.ndarray, length: int, padding: Padding) -> np.ndarray:
    filled = np.full((length, *array.shape[1:]), padding.value, dtype=array.dtype)
    filled[slice(0, len(array)) if padding.side == "right" else slice(length - len(array), length)] = array
    return filled
