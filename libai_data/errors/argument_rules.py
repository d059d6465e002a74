"""Rules for the values of arguments and config keys: a rule tests a value, and describes the allowed values."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import wraps
from numbers import Integral, Real
from typing import Any, Callable, NamedTuple, TypeVar

import numpy as np

from libai_data.errors import ConfigError, nearest

Function = TypeVar("Function", bound=Callable[..., Any])

_LARGEST = 2**62


class Rule(NamedTuple):
    """A rule for a value."""

    allowed: str  # the allowed values in words, as in "seed is 'x'; it must be <allowed>"
    accepts: Callable[[Any], bool]
    choices: tuple[Any, ...] = ()  # the allowed values, if there are few

    def problem(self, name: str, value: Any) -> str:
        """The message about a value that is not allowed."""
        hint = nearest(value, self.choices) if isinstance(value, str) else ""
        if isinstance(value, Integral) and value > _LARGEST:  # type: ignore[operator]
            hint = f" No number may be above {_LARGEST}."
        return f"{name} is {value!r:.200}; it must be {self.allowed}.{hint}"


def whole(least: int, most: int = _LARGEST, words: str = "") -> Rule:
    """An int from `least` to `most`, both included; `words` say what special values mean."""

    def accepts(value: Any) -> bool:
        return isinstance(value, Integral) and not isinstance(value, bool) and least <= value <= most  # type: ignore

    limits = f"at least {least}" if most == _LARGEST else f"{least} to {most}"
    return Rule(f"an int, {limits}{words and f' ({words})'}", accepts)


def real(least: float, most: float, words: str = "") -> Rule:
    """A finite number from `least` to `most`, both included."""

    def accepts(value: Any) -> bool:
        return isinstance(value, Real) and not isinstance(value, bool) and bool(least <= value <= most)  # type: ignore

    return Rule(f"a number, {least} to {most}{words and f' ({words})'}", accepts)


def one_of(*choices: Any) -> Rule:
    """One of a few values; the type must be equal too."""

    def accepts(value: Any) -> bool:
        return any(type(choice) is type(value) and choice == value for choice in choices)

    return Rule(" or ".join(map(repr, choices)), accepts, choices)


def instance_of(kind: type) -> Rule:
    """An object of a class."""
    return Rule(f"a {kind.__name__}", lambda value: isinstance(value, kind))


def list_of(kind: type, words: str, least: int = 0) -> Rule:
    """A list, or another sequence, of at least `least` elements, all of type `kind`."""

    def accepts(value: Any) -> bool:
        is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) >= least
        return is_list and all(isinstance(each, kind) and type(each) is not bool for each in value)

    return Rule(f"a list of {words}", accepts)


def each(rule: Rule, count: int | None = None, least: int = 0) -> Rule:
    """A list of `count` elements, or of any number from `least` on, that all follow a rule."""

    def accepts(value: Any) -> bool:
        fits = isinstance(value, (list, tuple)) and count in (None, len(value)) and len(value) >= least
        return fits and all(map(rule.accepts, value))

    return Rule(f"a list{'' if count is None else f' of {count}'}, each {rule.allowed}", accepts)


def several(rule: Rule) -> Rule:
    """A list, tuple or array of values that all follow a rule."""

    def accepts(value: Any) -> bool:
        is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
        return (is_list or bool(getattr(value, "shape", ()))) and all(map(rule.accepts, value))

    return Rule(f"a list, each {rule.allowed}", accepts)


def or_none(rule: Rule) -> Rule:
    """A rule that also allows None."""
    return rule._replace(allowed=f"{rule.allowed}, or None", accepts=lambda value: value is None or rule.accepts(value))


def _is_path(text: Any) -> bool:
    return isinstance(text, str) and bool(text) and "\0" not in text


def _is_output(value: Any) -> bool:
    # pathlib turns "s3://bucket" into "s3:/bucket".
    return PATH.accepts(value) and not re.search(r"^~|^[\w+.-]+:/|://", os.fspath(value))


INT = Rule("an int", lambda value: isinstance(value, Integral) and not isinstance(value, bool))
REAL = Rule("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool))
BATCH_SIZE = whole(1, 2**31 - 1)
EPOCH = whole(0, 2**31 - 1)
FLAG = one_of(True, False)
TEXT = Rule("a text", lambda value: isinstance(value, (str, os.PathLike)))
PATH = Rule("a path, as text or a pathlib.Path", lambda value: TEXT.accepts(value) and _is_path(os.fspath(value)))
OUTPUT = Rule("a path on this machine (no '~', and no address such as s3://bucket/x)", _is_output)
OUTPUT_FILE = Rule(
    "a path of a file on this machine (no folder, no '~', and no address such as s3://bucket/x)",
    lambda value: _is_output(value) and not os.path.isdir(value),
)
FILE_NAME = Rule("a name without '/'", lambda value: isinstance(value, str) and bool(value) and "/" not in value)
MAPPING = Rule("a mapping", lambda value: isinstance(value, Mapping))
FUNCTION = Rule("a function", callable)
FIELD_NAMES = Rule(
    "a list of one or more names, each once",
    lambda value: list_of(str, "", 1).accepts(value) and len({*value}) == len(value),
)
ANYTHING = Rule("anything", lambda value: True)


def check(rules: Mapping[str, Rule], /, **values: Any) -> None:
    """Check arguments against their rules.

    Args:
        rules: name -> rule.
        **values: name -> argument; an argument without a rule is accepted.

    Raises:
        ConfigError: An argument breaks its rule; the message names the first one, its value and the allowed values.
    """
    for name, value in values.items():
        if name in rules and not rules[name].accepts(value):
            raise ConfigError(rules[name].problem(name, value))


def check_methods(name: str, value: Any, base: str, *methods: str) -> None:
    """Refuse a class, and an object that lacks one of these methods, which objects of `base` have."""
    if isinstance(value, type):
        raise ConfigError(f"{name} is the class {value.__name__}; create one: {value.__name__}(...) is an object of it")
    kind = type(value).__name__
    for method in methods:
        if not callable(getattr(value, method, None)):
            raise ConfigError(f"{name} is a {kind}, which has no method {method}; derive it from {base}")


def refuse_unknown(whose: str, options: Collection[str], *takers: Callable[..., Any], given: Collection[str]) -> None:
    """Refuse options that are no parameter of any of `takers`, or that are `given` already."""
    if not options:
        return
    known = {
        name
        for taker in takers
        for name, parameter in inspect.signature(taker).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD and name not in given
    }
    for name in options:
        if name not in known:
            raise ConfigError(f"{whose} has no argument '{name}'.{nearest(name, known)}")


def refuse_unknown_keys(whose: str, keys: Iterable[str], known: Sequence[str]) -> None:
    """Refuse keys of a mapping that are not known."""
    for key in keys:
        if key not in known:
            raise ConfigError(f"{whose} has the unknown key '{key}'; known are {[*known]}.{nearest(key, known)}")


def with_python_numbers(function: Function) -> Function:
    """Convert numpy numbers in a function's arguments to Python numbers, because JSON cannot store numpy numbers."""

    def plain(value: Any) -> Any:
        return value.item() if isinstance(value, np.generic) else value

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return function(*map(plain, arguments), **{name: plain(value) for name, value in named.items()})

    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


_RULE_OF_TYPE = {
    "int": INT,
    "float": REAL,
    "bool": FLAG,
    "str": TEXT,
    "Path": TEXT._replace(allowed="a path"),
    "None": one_of(None),
    "Sequence[float]": several(REAL),
    "Sequence[str]": several(TEXT),
    "Sequence[Any]": several(ANYTHING),
}


def check_types(
    target: Callable[..., Any], values: Mapping[str, Any], rules: Mapping[str, Rule] | None = None, path: str = ""
) -> None:
    """Check numbers, flags, texts, and lists of these, against the type annotations of a target of this package, then
    against further `rules`. Other annotations, and targets of other packages, are not checked.

    Raises:
        ConfigError: A value has another type, or breaks its rule.
    """
    if not str(getattr(target, "__module__", "")).startswith("libai_data."):
        return
    parameters = inspect.signature(target, follow_wrapped=False).parameters
    for name, value in values.items():
        parameter = parameters.get(name)
        kinds = str(parameter.annotation).split(" | ") if parameter is not None else []
        types = [_RULE_OF_TYPE.get(kind) for kind in kinds]
        known = [rule for rule in types if rule is not None]
        if known and len(known) == len(types) and not any(rule.accepts(value) for rule in known):
            allowed = " or ".join(rule.allowed for rule in known)
            raise ConfigError(f"{path and path + '.'}{name} is {value!r:.200}; it must be {allowed}.")
    check(rules or {}, **values)
