"""Finds and checks the arguments of a target without calling the target."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Callable

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from libai_data.config.keys import every_key, join_path
from libai_data.config.naming import describe, locate
from libai_data.config.swallowed import keys_read, names_read
from libai_data.errors import ConfigError, nearest
from libai_data.errors.argument_rules import check_types

TARGET = "_target_"
RECURSIVE = "_recursive_"
SPECIAL_KEYS = frozenset({TARGET, RECURSIVE})


@dataclass(frozen=True)
class Parameters:
    """The arguments of a target that can be given by name."""

    positional: tuple[str, ...]  # arguments that can also be given by position, in order
    names: frozenset[str]
    required: frozenset[str]
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
        return Parameters((), frozenset(), frozenset(), takes_any=True)
    named = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return Parameters(
        positional=tuple(p.name for p in named if p.kind is p.POSITIONAL_OR_KEYWORD),
        names=frozenset(p.name for p in named),
        required=frozenset(p.name for p in named if p.default is p.empty),
        takes_any=any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()),
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


def check_keywords(target: Callable[..., Any], keywords: Collection[str], path: str) -> None:
    """Rejects keywords that the target does not accept."""
    parameters = parameters_of(target)
    for name in keywords:
        if not parameters.accepts(str(name)):
            raise ConfigError(
                f"{join_path(path, name)}: {describe(target)} has no argument {str(name)!r}."
                + (nearest(name, parameters.names) or f" It has: {', '.join(sorted(parameters.names)) or 'none'}.")
            )


def check_written(target: Callable[..., Any], keys: Collection[str], path: str) -> None:
    """Rejects keys of a config that the target accepts by `**kwargs`, but never reads."""
    read = names_read(target) if parameters_of(target).takes_any else None
    for name in keys:
        if read is not None and name not in read:
            raise ConfigError(
                f"{join_path(path, name)}: {describe(target)} accepts the argument {str(name)!r}, but never reads it."
                + (nearest(name, read) or f" It reads: {', '.join(sorted(read - {'self'})) or 'none'}.")
            )


def check_sections(target: Callable[..., Any], values: Mapping[str, Any], path: str) -> None:
    """Rejects keys of plain sections if the target gets the section, but never reads the key."""
    for name, section in values.items():
        if not isinstance(section, DictConfig) or TARGET in section or section._metadata.object_type is not dict:
            continue
        read = keys_read(target, name)
        for key in section:
            if read is not None and key not in read:
                raise ConfigError(
                    f"{join_path(join_path(path, name), key)}: {describe(target)} never reads the key {str(key)!r} of "
                    f"its argument {name!r}."
                    + (nearest(str(key), read) or f" It reads: {', '.join(sorted(read)) or 'none'}.")
                )


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
            check_keywords(target, keys, where)
            check_written(target, keys, where)
            set_now = [key for key in keys if not OmegaConf.is_interpolation(section, key)]
            values = {key: section[key] for key in set_now if not OmegaConf.is_missing(section, key)}
            check_sections(target, values, where)
            check_types(target, values, where)


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
