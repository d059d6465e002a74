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
            check_types(target, {key: value for key, value in values.items() if key not in open_keys}, where)


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
