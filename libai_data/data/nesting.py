"""Nested fields: taken apart into leaves that have a path each, and put together again."""

from __future__ import annotations

import dataclasses
from collections import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np

from libai_data.errors import SchemaError
from libai_data.structures import DistTensorData, Instance

TEXT = (str, bytes)
_MOST_CHECKED = 64
_MOST_DIMS = 32
Skeleton = Mapping[str, Any]
"""How a batch is nested: its fields with a `Leaf` in the place of each tensor."""


@dataclass(frozen=True)
class Leaf:
    """A placeholder in a skeleton for the value at the end of a path."""

    path: str  # names and numbers from the field on, joined by dots
    text: str | None = None  # "str" or "bytes" for a list of these, one for each row; None for a tensor


class TupleFields(dict[str, Any]):
    """The fields of a tuple: a batch that is made of them unpacks into values, not names."""


def is_named_tuple(value: Any) -> bool:
    """Whether a value is a tuple with field names."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def is_dataclass(value: Any) -> bool:
    """Whether a value is an object of a user's dataclass; its fields are read like those of a dict."""
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, DistTensorData))


def fields_of_dataclass(value: Any) -> dict[str, Any]:
    """The fields of an object of a dataclass, as they are."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def is_numbers(value: Any) -> bool:
    """Whether a value is a (nested) list of numbers, and so an array; an empty list is, a tuple is not."""
    if not isinstance(value, list):
        return False
    dims = 1
    while value and isinstance(value[0], list) and dims < _MOST_DIMS:  # A list may contain itself.
        value, dims = value[0], dims + 1
    # Checking thousands of tokens would cost as much as making the array, which refuses values that are no numbers.
    kinds = {*map(type, value[:_MOST_CHECKED])}
    return all(issubclass(kind, (bool, int, float, np.generic)) and not issubclass(kind, TEXT) for kind in kinds)


def is_texts(value: Any) -> bool:
    """Whether a value is a list of strings of one kind, as a batch has it: one for each row."""
    kind = str if isinstance(value, list) and value and isinstance(value[0], str) else bytes
    return isinstance(value, list) and bool(value) and all(isinstance(item, kind) for item in value)


def is_nest(value: Any) -> bool:
    """Whether a value of a batch has leaves, or is text, rather than being a tensor."""
    if isinstance(value, Instance):
        return False
    if isinstance(value, abc.Mapping) or is_dataclass(value):
        return True
    return isinstance(value, (list, tuple)) and not is_numbers(value)


def taken_apart(fields: Mapping[str, Any], leaves: dict[str, Any]) -> dict[str, Any]:
    """Put the leaves of a batch's fields into `leaves`, by their paths; a SchemaError if two have the same path.

    Args:
        fields: field name -> mapping, dataclass, tuple, named tuple or list of such, down to tensors and lists of
            strings. What was a dataclass is a dict in the skeleton.

    Returns:
        The skeleton: the fields with a `Leaf` in the place of each leaf.
    """
    # The text of a name that is both a str and an Enum is its value; `str` would give the name of the member.
    names = {name: str.__str__(name) if isinstance(name, str) else str(name) for name in [*fields.keys()]}
    skeleton = {text: _apart(fields[name], text, leaves) for name, text in names.items()}
    return TupleFields(skeleton) if isinstance(fields, TupleFields) else skeleton


def _apart(value: Any, path: str, leaves: dict[str, Any]) -> Any:
    if is_texts(value):
        return _leaf(Leaf(path, "str" if isinstance(value[0], str) else "bytes"), value, leaves)
    if is_dataclass(value):
        value = fields_of_dataclass(value)
    if isinstance(value, abc.Mapping) and not isinstance(value, Instance):
        return {key: _apart(value[key], f"{path}.{key}", leaves) for key in [*value.keys()]}
    if is_named_tuple(value):
        return value._make(_apart(item, f"{path}.{name}", leaves) for name, item in zip(value._fields, value))
    if is_nest(value):
        parts = [_apart(item, f"{path}.{number}", leaves) for number, item in enumerate(value)]
        return parts if isinstance(value, list) else tuple(parts)
    return _leaf(Leaf(path), value, leaves)


def _leaf(leaf: Leaf, value: Any, leaves: dict[str, Any]) -> Leaf:
    if leaf.path in leaves:
        raise SchemaError(f"two fields have the path '{leaf.path}'; rename one of them")
    leaves[leaf.path] = value
    return leaf


def put_together(skeleton: Any, value_of: Callable[[Leaf], Any]) -> Any:
    """Build the nested value of a skeleton, or of a part of it, with `value_of(leaf)` in the place of each leaf; the
    inverse of `taken_apart`."""
    if isinstance(skeleton, Leaf):
        return value_of(skeleton)
    if isinstance(skeleton, dict):
        fields = {key: put_together(item, value_of) for key, item in skeleton.items()}
        return TupleFields(fields) if isinstance(skeleton, TupleFields) else fields
    parts = [put_together(item, value_of) for item in skeleton]
    if is_named_tuple(skeleton):
        return skeleton._make(parts)
    return parts if isinstance(skeleton, list) else tuple(parts)


def with_leaves(name: str, value: Any, change: Callable[[str, Any], Any]) -> Any:
    """The nested value of a field, with `change(path, leaf)` in the place of each leaf."""
    leaves: dict[str, Any] = {}
    skeleton = taken_apart({name: value}, leaves)
    return put_together(skeleton[name], lambda leaf: change(leaf.path, leaves[leaf.path]))


def is_flat(skeleton: Mapping[str, Any]) -> bool:
    """Whether the batch is a dict of tensors, so that leaves and fields are the same."""
    return not isinstance(skeleton, TupleFields) and all(
        isinstance(part, Leaf) and part.text is None for part in skeleton.values()
    )


def text_to_array(texts: Sequence[Any]) -> np.ndarray:
    """Strings as an array with a row for each, uint8 [n, 4 + longest]: a length in 4 bytes, then the string."""
    # File names that are not UTF-8 contain surrogates.
    packed: list[bytes] = [text.encode(errors="surrogatepass") if isinstance(text, str) else text for text in texts]
    array = np.zeros((len(packed), 4 + max(map(len, packed), default=0)), dtype=np.uint8)
    for row, text in zip(array, packed):
        row[: 4 + len(text)] = np.frombuffer(len(text).to_bytes(4, "little") + text, dtype=np.uint8)
    return array


def array_to_text(array: np.ndarray, kind: str | None) -> list[Any]:
    """The strings of a kind, "str" or "bytes", in an array uint8 [n, width] that `text_to_array` made."""
    rows = [bytes(row) for row in np.ascontiguousarray(array)]
    texts = [row[4 : 4 + int.from_bytes(row[:4], "little")] for row in rows]
    return [text.decode(errors="surrogatepass") for text in texts] if kind == "str" else list(texts)


def array_of(values: Any, dtype_if_empty: type | None = None) -> np.ndarray:
    """Convert a user's value to an array. If this fails, as for lists of unequal lengths, an empty array of objects."""
    try:
        array = np.asarray(values)
    except ValueError:
        return np.empty(0, object)
    return array if array.size or dtype_if_empty is None else array.astype(dtype_if_empty)
