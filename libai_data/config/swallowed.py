"""Finds which arguments a callable reads of its `**kwargs` or of a section: a misspelled key would have no effect.

Python cannot report which names a call reads, so this module analyses the callable's source code. If the source is not
conclusive, every name counts as read.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from types import FunctionType
from typing import Any, Callable, NamedTuple

from omegaconf import DictConfig

_READS_ALL = frozenset({"locals", "vars", "eval", "exec", "save_hyperparameters", "currentframe", "_getframe", "stack"})
_READS_ONE = frozenset({"get", "pop"})


def names_read(target: Callable[..., Any]) -> frozenset[str] | None:
    """The names of all keywords that a callable reads; None if they cannot be determined.

    `**kwargs` is understood if it is never read, read by literal names (`kwargs.get("name")`), or passed on to
    `super().__init__`.
    """
    if isinstance(target, FunctionType):
        return _names_of(target, ())
    if not _has_plain_init(target) or any("__new__" in vars(each) for each in target.__mro__[:-1]):  # type: ignore[attr-defined]
        return None
    return _names_of_next(target.__mro__)  # type: ignore[attr-defined]


def keys_read(target: Callable[..., Any], parameter: str) -> frozenset[str] | None:
    """The keys that a callable reads of a section in the argument `parameter`; None if they cannot be determined."""
    init = inspect.getattr_static(target, "__init__") if _has_plain_init(target) else target
    if not isinstance(init, FunctionType) or parameter not in inspect.signature(init).parameters:
        return None
    uses = _uses_in(init, parameter, is_section=True)
    return None if uses is None or uses.are_passed_on else uses.names


def _has_plain_init(target: Any) -> bool:
    """Whether `target` is a class whose call runs `__init__` with the same arguments."""
    return isinstance(target, type) and type(target).__call__ is type.__call__


def _names_of_next(classes: tuple[type, ...]) -> frozenset[str] | None:
    """The names that the next `__init__` of a method resolution order reads."""
    for place, each in enumerate(classes[:-1]):
        if "__init__" in vars(each):
            init = vars(each)["__init__"]
            return _names_of(init, classes[place + 1 :]) if isinstance(init, FunctionType) else None
    return frozenset()


def _names_of(function: FunctionType, others: tuple[type, ...]) -> frozenset[str] | None:
    if hasattr(function, "__wrapped__"):
        return None
    parameters = inspect.signature(function).parameters.values()
    names = frozenset(each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY))
    extra = next((each.name for each in parameters if each.kind is each.VAR_KEYWORD), None)
    if extra is None:
        return names
    uses = _uses_in(function, extra)
    passed_on = _names_of_next(others) if uses is not None and uses.are_passed_on and others else frozenset()
    return None if uses is None or passed_on is None else names | uses.names | passed_on


class _Uses(NamedTuple):
    """How a function uses its `**kwargs`, or a section of the config."""

    names: frozenset[str]
    are_passed_on: bool  # to the next `__init__`


@lru_cache(maxsize=256)
def _uses_in(function: FunctionType, parameter: str, is_section: bool = False) -> _Uses | None:
    """The uses in the source of a function; None if there is no source, or it has a use that is not understood."""
    if hasattr(function, "__wrapped__"):
        return None
    try:
        nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))))
    except (OSError, TypeError, SyntaxError):
        return None
    names: set[str] = set()
    passed_on = [
        each.value
        for node in nodes
        if isinstance(node, ast.Call) and _is_super_init(node)
        for each in node.keywords
        if each.arg is None
    ]
    understood: list[ast.AST] = list(passed_on)
    for node in nodes:
        for thing, key in _reads_of(node, is_section):
            if _is_name(thing, parameter) and isinstance(key, ast.Constant) and isinstance(key.value, str):
                names.add(key.value)
                understood.append(thing)
    for node in nodes:
        word = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if word in _READS_ALL or (_is_name(node, parameter) and node not in understood):
            return None
    return _Uses(frozenset(names), any(_is_name(each, parameter) for each in passed_on))


def _reads_of(node: ast.AST, is_section: bool) -> Iterator[tuple[ast.AST, ast.AST]]:
    """If a node reads a key, the object that has the key, and the key; attributes of a section are keys too."""
    if isinstance(node, ast.Subscript):
        yield node.value, node.slice
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        yield node.comparators[0], node.left
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        if node.func.attr in _READS_ONE:
            yield node.func.value, node.args[0]
    elif is_section and isinstance(node, ast.Attribute) and not hasattr(DictConfig, node.attr):
        yield node.value, ast.Constant(node.attr)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_super_init(node: ast.Call) -> bool:
    """Whether a call is `super().__init__(...)`."""
    if not (isinstance(node.func, ast.Attribute) and node.func.attr == "__init__"):
        return False
    called = node.func.value
    return isinstance(called, ast.Call) and _is_name(called.func, "super") and not called.args
