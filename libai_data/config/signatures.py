"""Finds and checks the arguments of a target without calling the target.

A misspelled key that a target accepts by `**kwargs`, or in a section, would have no effect. Python cannot report which
names a call reads, so `names_read` and `keys_read` analyse the callable's source code. If the source is not conclusive,
every name counts as read.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from types import FunctionType
from typing import Any, Callable, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from libai_data.config.keys import every_key, join_path
from libai_data.config.naming import describe, locate
from libai_data.errors import ConfigError, nearest
from libai_data.errors.argument_rules import check_types

TARGET = "_target_"
RECURSIVE = "_recursive_"
SPECIAL_KEYS = frozenset({TARGET, RECURSIVE})

_READS_ALL = frozenset({"locals", "vars", "eval", "exec", "save_hyperparameters", "currentframe", "_getframe", "stack"})
_READS_ONE = frozenset({"get", "pop"})


@dataclass(frozen=True)
class Parameters:
    """The arguments of a target that can be given by name."""

    names: frozenset[str]
    takes_any: bool  # whether the target has `**kwargs`, or its arguments are unknown

    def accepts(self, name: str) -> bool:
        """Whether the target can be called with this keyword."""
        return self.takes_any or name in self.names


def parameters_of(target: Callable[..., Any]) -> Parameters:
    """The arguments of a callable. If they are unknown (some builtins), any argument is accepted."""
    try:
        # Use the signature of a wrapper, not of the wrapped function: the wrapper may have other arguments.
        signature = inspect.signature(target, follow_wrapped=False)
    except (TypeError, ValueError):
        return Parameters(frozenset(), takes_any=True)
    parameters = signature.parameters.values()
    return Parameters(
        frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)),
        takes_any=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def resolve_target(target: Any, path: str) -> Callable[..., Any]:
    """The callable of a `_target_`, which is a callable or a dotted name; `path` is the key of the section."""
    if isinstance(target, str):
        try:
            target = locate(target)
        except ConfigError as error:
            raise ConfigError(f"{join_path(path, TARGET)}: {error}") from error.__cause__
    if not callable(target):
        raise ConfigError(f"{join_path(path, TARGET)} is {target!r}, which cannot be called.")
    return target


def check_arguments(
    target: Callable[..., Any], keywords: Collection[str], written: Mapping[str, Any], path: str
) -> None:
    """Rejects arguments of a call that have no effect.

    Args:
        keywords: the names of all arguments; the target must accept them.
        written: the arguments that the config has, with their values. The target must read them, and the keys of those
            that are sections. A target may accept a name by `**kwargs`, and never read it.
        path: the key of the call in the config.
    """
    parameters = parameters_of(target)
    for name in keywords:
        if not parameters.accepts(str(name)):
            raise _has_no_effect(path, name, target, f"has no argument {str(name)!r}", parameters.names, "has")
    read = names_read(target) if parameters.takes_any else None
    for name, value in written.items():
        if read is not None and name not in read:
            raise _has_no_effect(
                path, name, target, f"accepts the argument {str(name)!r}, but never reads it", read - {"self"}, "reads"
            )
        is_section = isinstance(value, DictConfig) and TARGET not in value and value._metadata.object_type is dict
        keys = keys_read(target, name) if is_section else None
        if keys is None:
            continue
        for key in value:
            if key not in keys:
                what = f"never reads the key {str(key)!r} of its argument {name!r}"
                raise _has_no_effect(join_path(path, name), key, target, what, keys, "reads")


def _has_no_effect(
    path: str, name: str, target: Callable[..., Any], what: str, known: Collection[str], verb: str
) -> ConfigError:
    hint = nearest(str(name), known) or f" It {verb}: {', '.join(sorted(known)) or 'none'}."
    return ConfigError(f"{join_path(path, name)}: {describe(target)} {what}.{hint}")


def check_targets(cfg: Any) -> None:
    """Checks the arguments of all LazyCalls in a config, or in a part of a config, before anything is built.

    Every target in the config must exist and accept the keywords of its section, with values of their types. Missing
    arguments are no error, because the trainer adds some.

    Raises:
        ConfigError: a target cannot be called so; the message names the key, the target and the nearest argument.
    """
    for where, section in chain([("", cfg)], every_key(cfg)):
        if not isinstance(section, DictConfig) or TARGET not in section:
            continue
        target = _written_target(section, where)
        if not isinstance(target, DictConfig):
            target = resolve_target(target, where)
            keys = [key for key in section if key not in SPECIAL_KEYS]
            open_keys = [
                key for key in keys if OmegaConf.is_interpolation(section, key) or OmegaConf.is_missing(section, key)
            ]
            values = {key: None if key in open_keys else section[key] for key in keys}
            check_arguments(target, keys, values, where)
            check_types(target, {key: value for key, value in values.items() if key not in open_keys}, path=where)


def check_is_call(section: Any, path: str) -> None:
    """Raise a ConfigError if a section is no LazyCall."""
    if not isinstance(section, DictConfig) or TARGET not in section:
        raise ConfigError(f"{path} is {section!r:.200}; it must be a LazyCall, {{{TARGET}: ..., and its arguments}}.")
    if OmegaConf.is_missing(section, TARGET):
        raise ConfigError(f"{path}.{TARGET} has no value; set it to a callable, or to the dotted name of one.")


def target_of(section: Any, path: str) -> Callable[..., Any] | None:
    """The callable of a LazyCall's section; None if the section is no LazyCall, or its target is a LazyCall too."""
    if not isinstance(section, DictConfig):
        return None
    target = _written_target(section, path)
    return None if target is None or isinstance(target, DictConfig) else resolve_target(target, path)


def _written_target(section: DictConfig, path: str) -> Any:
    try:
        return section.get(TARGET)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{join_path(path, TARGET)} refers to a key that does not exist: {reason}.") from None


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
