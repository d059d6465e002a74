"""Finds which arguments a callable reads of its `**kwargs` or of a section: a misspelled key would have no effect.

Python cannot report which names a call reads, so this module analyses the callable's source code. If the source is not
conclusive, every name counts as read.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import lru_cache
from types import FunctionType
from typing import Any, Callable

from omegaconf import DictConfig

_READS_ALL = frozenset({"locals", "vars", "eval", "exec", "save_hyperparameters", "currentframe", "_getframe", "stack"})
_READS_ONE = frozenset({"get", "pop"})


def names_read(target: Callable[..., Any]) -> frozenset[str] | None:
    """The names of all keywords that a callable reads; None if they cannot be determined.

    `**kwargs` is understood if it is never read, read by literal names (`kwargs.get("name")`), or passed on to
    `super().__init__`.
    """
    return _names_read(target) if isinstance(target, (FunctionType, type)) else None


@lru_cache(maxsize=256)
def keys_read(target: Callable[..., Any], parameter: str) -> frozenset[str] | None:
    """The keys that a callable reads of a section in the argument `parameter`; None if they cannot be determined."""
    is_class = isinstance(target, type) and type(target).__call__ is type.__call__
    init = inspect.getattr_static(target, "__init__") if is_class else target
    if not isinstance(init, FunctionType) or parameter not in inspect.signature(init).parameters:
        return None
    uses = _uses_in(init, _UsesOfSection(parameter))
    return None if uses is None or uses.are_unknown or uses.are_passed_on else uses.names


@lru_cache(maxsize=256)
def _names_read(target: FunctionType | type) -> frozenset[str] | None:
    if isinstance(target, FunctionType):
        return _names_of(target, ())
    if type(target).__call__ is not type.__call__ or any("__new__" in vars(each) for each in target.__mro__[:-1]):
        return None
    return _names_of_next(target.__mro__)


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
    uses = _uses_in(function, _Uses(extra))
    if uses is None:
        return None
    passed_on = _names_of_next(others) if uses.are_passed_on and others else frozenset()
    return None if uses.are_unknown or passed_on is None else names | uses.names | passed_on


def _uses_in(function: FunctionType, uses: _Uses) -> _Uses | None:
    """Analyse the source of a function; None if there is no source."""
    if hasattr(function, "__wrapped__"):
        return None
    try:
        uses.visit(ast.parse(textwrap.dedent(inspect.getsource(function))))
    except (OSError, TypeError, SyntaxError):
        return None
    return uses


class _Uses(ast.NodeVisitor):
    """How the body of a function uses its `**kwargs`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.names: frozenset[str] = frozenset()
        self.are_passed_on = self.are_unknown = False

    def visit_Name(self, node: ast.Name) -> None:
        # The methods below handle all uses that are understood, and do not visit this name for them.
        self.are_unknown |= node.id == self._name or node.id in _READS_ALL

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.are_unknown |= node.attr in _READS_ALL
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function, arguments = node.func, node.args
        reads_one = isinstance(function, ast.Attribute) and self._is_it(function.value) and function.attr in _READS_ONE
        if reads_one and arguments and self._reads(arguments[0]):
            for each in arguments[1:]:
                self.visit(each)
            return
        if _is_super_init(function):
            others = [each for each in node.keywords if each.arg is not None or not self._is_it(each.value)]
            self.are_passed_on |= len(others) < len(node.keywords)
            for argument in (*arguments, *(each.value for each in others)):
                self.visit(argument)
            return
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not (self._is_it(node.value) and self._reads(node.slice)):
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        is_search = len(node.ops) == 1 and isinstance(node.ops[0], (ast.In, ast.NotIn))
        if not (is_search and self._is_it(node.comparators[0]) and self._reads(node.left)):
            self.generic_visit(node)

    def _is_it(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == self._name

    def _reads(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.names |= {node.value}
            return True
        return False


class _UsesOfSection(_Uses):
    """How the body of a function uses a section of the config; keys may also be read as attributes."""

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if self._is_it(node.value) and not hasattr(DictConfig, node.attr):
            self.names |= {node.attr}
        else:
            super().visit_Attribute(node)


def _is_super_init(function: ast.AST) -> bool:
    if not (isinstance(function, ast.Attribute) and function.attr == "__init__"):
        return False
    called = function.value
    is_super = isinstance(called, ast.Call) and isinstance(called.func, ast.Name) and called.func.id == "super"
    return is_super and not called.args  # type: ignore[attr-defined]
