"""What an object of the user has under the name of a protocol. What a proxy makes up for any name is no answer."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getattr_static
from typing import Any

_ABSENT = object()
_NO_NAME = "_libai_data_name_of_nothing"


def attribute_of(thing: Any, name: str, default: Any = None) -> Any:
    """The attribute of an object, or `default`.

    If only `__getattr__` gives the attribute, as in a wrapper, it counts. If that gives any name, as in a mock, it does
    not. A `__getattr__` that raises anything, such as a KeyError, has no such attribute.
    """
    if getattr_static(thing, name, _ABSENT) is not _ABSENT:
        return getattr(thing, name, default)
    if name.startswith("__") or _answers(thing, _NO_NAME):
        return default
    return getattr(thing, name) if _answers(thing, name) else default


def has_attribute(thing: Any, name: str) -> bool:
    """Whether `attribute_of` finds an attribute, be it None."""
    return attribute_of(thing, name, _ABSENT) is not _ABSENT


def call_if_there(thing: Any, name: str, *arguments: Any) -> None:
    """Call a method of an object, if it has this method."""
    method = attribute_of(thing, name)
    if callable(method):
        method(*arguments)


def batch_method_of(dataset: Any, name: str) -> Callable[..., Any] | None:
    """The method of a dataset that reads several samples, if it reads what `dataset[index]` reads.

    A subclass or wrapper that has a `__getitem__` of its own makes other samples than the method below it.
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
