"""Looks up attributes of users' objects. An attribute that a proxy makes up for any name does not count."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getattr_static
from typing import Any

_ABSENT = object()
_NO_NAME = "_libai_data_name_of_nothing"


def attribute_of(thing: Any, name: str, default: Any = None) -> Any:
    """The attribute of an object, or `default`.

    An attribute from `__getattr__` counts, as in a wrapper, unless `__getattr__` returns something for any name, as in
    a mock. If `__getattr__` raises anything, such as a KeyError, the object has no such attribute.
    """
    if getattr_static(thing, name, _ABSENT) is not _ABSENT:
        return getattr(thing, name, default)
    if name.startswith("__") or _answers(thing, _NO_NAME):
        return default
    return getattr(thing, name) if _answers(thing, name) else default


def has_attribute(thing: Any, name: str) -> bool:
    """Whether `attribute_of` finds an attribute, even if its value is None."""
    return attribute_of(thing, name, _ABSENT) is not _ABSENT


def call_if_there(thing: Any, name: str, *arguments: Any) -> None:
    """Call a method of an object, if it has this method."""
    method = attribute_of(thing, name)
    if callable(method):
        method(*arguments)


def inner_datasets(dataset: Any) -> list[Any]:
    """What a dataset wraps or joins: its attributes `source` and `dataset`, and the datasets of its list `datasets`."""
    joined = attribute_of(dataset, "datasets")
    inner = [attribute_of(dataset, name) for name in ("source", "dataset")]
    return [each for each in (*inner, *(joined if isinstance(joined, (list, tuple)) else ())) if each is not None]


def batch_method_of(dataset: Any, name: str) -> Callable[..., Any] | None:
    """The method of a dataset that reads several samples; None if it reads other samples than `dataset[index]`.

    A subclass or wrapper with its own `__getitem__` makes other samples than the method that it inherits or wraps.
    """
    if name not in getattr(dataset, "__dict__", {}):
        for each in type(dataset).__mro__:
            if name in vars(each):
                break
            if "__getitem__" in vars(each):
                return None
    method = attribute_of(dataset, name)
    return method if callable(method) else None


def _answers(thing: Any, name: str) -> bool:
    try:
        getattr(thing, name)
    except Exception:
        return False
    return True
