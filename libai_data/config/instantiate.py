"""Calls that are described first and made later: `LazyCall` describes a call, and `instantiate` makes the call."""

from __future__ import annotations

import dataclasses
import functools
from collections import abc
from collections.abc import Iterator
from typing import Any, Callable

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from libai_data.config.keys import join_path, path_of
from libai_data.config.naming import describe, dotted_name
from libai_data.config.signatures import (
    RECURSIVE,
    SPECIAL_KEYS,
    TARGET,
    check_arguments,
    resolve_target,
)
from libai_data.errors import ConfigError, DataPipelineError, comes_from_signal_handler, error_text
from libai_data.errors.argument_rules import check_types


class LazyCall:
    """Wraps a callable: calling the wrapper returns a description of the call, which `instantiate` makes later.

    Example:

        dataset = LazyCall(ImageFolderDataset)(root="data/train", transform=LazyCall(ToArray)())
        dataset.root = "elsewhere"
        dataset = instantiate(dataset)

    Args:
        target: a callable (function, class, dataclass), the dotted name of one, or another LazyCall's description
            whose result is the callable.
    """

    def __init__(self, target: Any) -> None:
        if not (callable(target) or isinstance(target, (str, abc.Mapping, DictConfig))):
            raise ConfigError(
                f"LazyCall needs something to call (a function, a class, or the dotted name of one); "
                f"got {target!r} of type {type(target).__name__}."
            )
        self._target = target

    def __call__(self, /, *args: Any, **kwargs: Any) -> DictConfig:
        """The description: a section with the arguments, and with the target as `_target_`.

        Raises:
            ConfigError: An argument is given by position.
        """
        if args:
            target = self._target
            name = target if isinstance(target, str) else getattr(target, "__qualname__", type(target).__qualname__)
            raise ConfigError(
                f"LazyCall({name}) takes keyword arguments only, since each becomes a key of the "
                f"config; got {len(args)} by position. Write their names."
            )
        return DictConfig({"_target_": _storable(self._target), **kwargs}, flags={"allow_objects": True})


def instantiate(cfg: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Makes the call that a LazyCall describes; calls among its arguments are made first.

    A target receives a list or tuple of the config as a plain list. It receives a section without `_target_` as a
    `DictConfig`, whose values are read as attributes or by key; the LazyCalls in it are called first. Interpolations
    are resolved. Other values are passed unchanged. With `_recursive_=False`, here or as a key of a LazyCall, the
    LazyCalls among its arguments are passed without calling them. A list among `kwargs` that has no LazyCall is data:
    it is passed unchanged, and not searched.

    Args:
        cfg: a LazyCall's section, or a list or section with some. Other values are returned unchanged.
        *args: positional arguments for the target.
        **kwargs: further arguments, which override the config's; a mapping is merged into a section of the same name.

    Returns:
        The target's result. For a list, a list; for a section without `_target_`, a section.

    Raises:
        ConfigError: the target does not exist, has no such keyword, lacks an argument, or raised an error. The message
            names the key in the config and the target, and the original error is its cause. When the target raised one
            of this package's errors, the class stays the same.
    """
    path = path_of(cfg)
    try:
        recursive = _recursion_flag(kwargs.pop(RECURSIVE, True), path)
        if isinstance(cfg, (DictConfig, ListConfig)) and cfg._is_none():
            return None
        if _is_call(cfg):
            return _call(cfg, args, kwargs, recursive, path)
        if args or kwargs:
            raise ConfigError(
                f"{path or 'The config'} has no _target_ to call, so these arguments cannot be passed: "
                f"{', '.join([*(type(arg).__name__ for arg in args), *kwargs])}."
            )
        return _build(cfg, recursive, path)
    except DataPipelineError as error:
        if error.config_path is None:
            error.config_path = path
        raise
    except OmegaConfBaseException as error:
        raise _located(ConfigError(f"Cannot build {path or 'the config'}: {error}"), path) from None


def instantiate_data(data: Any) -> Any:
    """As `instantiate`, of a dataset, several, or their LazyCalls; but samples are not searched for calls."""
    return data if _is_data(data) else instantiate(data)


def _storable(target: Any) -> Any:
    """The target in a form that OmegaConf stores unchanged.

    OmegaConf would turn a dataclass into a section of its fields, and it rejects the built-in containers.
    """
    if isinstance(target, (str, abc.Mapping, DictConfig)):
        return target
    if dataclasses.is_dataclass(target) or hasattr(target, "__attrs_attrs__") or target in (dict, list, tuple):
        return dotted_name(target) or functools.partial(target)
    return target


def _build(node: Any, recursive: bool, path: str) -> Any:
    """The value that a target receives for `node`."""
    if isinstance(node, DictConfig) and _is_object(node):
        return OmegaConf.to_object(node)
    if isinstance(node, ListConfig):
        return [_build(item, recursive, join_path(path, i)) if recursive else item for i, item in enumerate(node)]
    if not recursive or not _holds_call(node):
        return node
    if _is_call(node):
        return _call(node, (), {}, recursive, path)
    if isinstance(node, (list, tuple)):
        # A target that got a list unbuilt (`_recursive_=False`) may pass the list to `instantiate` later.
        return type(node)(_build(item, recursive, path_of(item) or join_path(path, i)) for i, item in enumerate(node))
    built = {key: _build(value, recursive, join_path(path, key)) for key, value in node.items()}
    return DictConfig(built, flags={"allow_objects": True}) if isinstance(node, DictConfig) else built


def _call(cfg: Any, args: tuple[Any, ...], extra: dict[str, Any], recursive: bool, path: str) -> Any:
    recursive = _recursion_flag(cfg.get(RECURSIVE, recursive), path)
    target = cfg[TARGET]
    if _is_call(target):
        target = _call(target, (), {}, True, join_path(path, TARGET))
    target = resolve_target(target, path)
    # Arguments that are open ("???") in the config, and given now.
    filled_in = {key for key in extra if isinstance(cfg, DictConfig) and OmegaConf.is_missing(cfg, key)}
    written = {str(key): cfg[key] for key in cfg if key not in SPECIAL_KEYS and key not in filled_in}
    given = dict(written)
    given.update({key: _merged(given.get(key), value) for key, value in extra.items()})
    check_arguments(target, given, written, path)
    data = {key for key, value in extra.items() if _is_data(value)}
    built = {
        key: value if key in data else _build(value, recursive, join_path(path, key)) for key, value in given.items()
    }
    check_types(target, built, path=path)
    try:
        return target(*args, **built)
    # If a library calls `sys.exit(0)`, the object of the config does not exist, so this is an error too.
    except (Exception, SystemExit) as error:
        if isinstance(error, DataPipelineError) and error.config_path is not None:
            raise  # an inner instantiate already added the place
        if isinstance(error, SystemExit) and comes_from_signal_handler(error):
            raise
        raise _named(error, target, path, built) from error


def _named(
    error: BaseException, target: Callable[..., Any], path: str, arguments: abc.Mapping[str, Any]
) -> DataPipelineError:
    """An error whose message has the key of the call; if `error` is of this package, the class stays the same.

    This package's errors name the argument already. For other errors, the message lists the plain arguments.
    """
    is_ours = isinstance(error, DataPipelineError)
    message = f"{path or 'The config'}: calling {describe(target)} failed: {error if is_ours else error_text(error)}"
    plain = [f"{name}={value!r:.60}" for name, value in arguments.items() if isinstance(value, (int, float, str))]
    if plain and not is_ours:
        message += f" (called with {', '.join(plain):.300})"
    try:
        named: Any = type(error)(message) if is_ours else ConfigError(message)
    except TypeError:  # the constructor of the class requires more than a message
        named = ConfigError(message)
    return _located(named, path)


def _located(error: DataPipelineError, path: str) -> DataPipelineError:
    error.config_path = path
    return error


def _merged(present: Any, new: Any) -> Any:
    merges = isinstance(new, (dict, DictConfig)) and not _is_call(new)
    if merges and isinstance(present, DictConfig) and not _is_object(present):
        return OmegaConf.merge(present, DictConfig(new, flags={"allow_objects": True}))
    return new


def _is_object(node: DictConfig) -> bool:
    """Whether a section was made from an instance of a dataclass, which OmegaConf stores as a section."""
    kind = OmegaConf.get_type(node)
    return dataclasses.is_dataclass(kind) or hasattr(kind, "__attrs_attrs__")


def _is_call(node: Any) -> bool:
    return isinstance(node, (abc.Mapping, DictConfig)) and TARGET in node


def _holds_call(node: Any) -> bool:
    """Whether a node contains a call or a dataclass to build, at any depth of lists and sections."""
    if isinstance(node, (dict, DictConfig)):
        if TARGET in node or (isinstance(node, DictConfig) and _is_object(node)):
            return True
        return any(_holds_call(value) for value in _values(node))
    if isinstance(node, (list, ListConfig)) or type(node) is tuple:
        return any(_holds_call(value) for value in _values(node))
    return False


def _is_data(value: Any) -> bool:
    """Whether a value that is passed in Python is a list of samples or numbers. A `_target_` in it is no call."""
    return isinstance(value, (list, tuple)) and not any(isinstance(item, (DictConfig, ListConfig)) for item in value)


def _values(node: Any) -> Iterator[Any]:
    """The values, except values that are open ("???") or that refer to a key that does not exist."""
    if not isinstance(node, (DictConfig, ListConfig)):
        yield from node.values() if isinstance(node, dict) else node
        return
    for key in node if isinstance(node, DictConfig) else range(len(node)):
        try:
            yield node[key]
        except (MissingMandatoryValue, InterpolationResolutionError):
            continue


def _recursion_flag(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{join_path(path, RECURSIVE)} must be true or false; found {value!r}.")
    return value
