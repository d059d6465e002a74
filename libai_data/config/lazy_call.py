"""A call written down, to be changed and made later."""

from __future__ import annotations

import dataclasses
import functools
from collections import abc
from typing import Any

from omegaconf import DictConfig

from libai_data.config.naming import dotted_name
from libai_data.errors import ConfigError


class LazyCall:
    """Wraps a callable so that calling it gives a description of the call, to be made by `instantiate`.

    Example:

        dataset = LazyCall(ImageFolderDataset)(root="data/train", transform=LazyCall(ToArray)())
        dataset.root = "elsewhere"
        dataset = instantiate(dataset)

    Args:
        target: a callable (function, class, dataclass), the dotted name of one, or another LazyCall's description
            whose result is to be called.
    """

    def __init__(self, target: Any) -> None:
        if not (callable(target) or isinstance(target, (str, abc.Mapping, DictConfig))):
            raise ConfigError(
                f"LazyCall wants something to call (a function, a class, or the dotted name of one); "
                f"got {target!r} of type {type(target).__name__}."
            )
        self._target = target

    def __call__(self, /, *args: Any, **kwargs: Any) -> DictConfig:
        """The description: a section with the arguments, and the target as `_target_`."""
        if args:
            raise ConfigError(
                f"LazyCall({_label(self._target)}) takes keyword arguments only, since each becomes a key of the "
                f"config; got {len(args)} by position. Write their names."
            )
        return DictConfig({"_target_": _storable(self._target), **kwargs}, flags={"allow_objects": True})


def _storable(target: Any) -> Any:
    """The target in a form that OmegaConf keeps.

    It would turn a dataclass into a section of its fields, and it refuses the built-in containers.
    """
    if isinstance(target, (str, abc.Mapping, DictConfig)):
        return target
    if dataclasses.is_dataclass(target) or hasattr(target, "__attrs_attrs__") or target in (dict, list, tuple):
        return dotted_name(target) or functools.partial(target)
    return target


def _label(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__qualname__", type(target).__qualname__)
