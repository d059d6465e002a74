"""Runs config files written in Python.

A config file may import other config files by relative imports (`from .common.train import train`), which are resolved
by paths on disk. Each load runs each file again, in a new namespace. Nothing is kept in `sys.modules`, so one load
cannot change another load.
"""

from __future__ import annotations

import builtins
import copy
import itertools
import os
import sys
import traceback
import types
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig
from omegaconf.errors import OmegaConfBaseException

from libai_data.config.naming import CONFIG_MODULE_PREFIX
from libai_data.errors import (
    ConfigError,
    ConfigImportError,
    DataPipelineError,
    comes_from_signal_handler,
    error_text,
    nearest,
)

_numbers = itertools.count()
_NO_USERS = ("libai_data", "omegaconf", "importlib")


def run_config_file(path: str) -> dict[str, Any]:
    """Runs a config file and everything that it imports relatively; returns the names that it defines or imports.

    A ConfigError names the file and line that is not valid, raises an error, or imports what is not there.
    """
    try:
        return _run(os.path.abspath(path), ()).__dict__
    # A program whose config calls `sys.exit(0)`, perhaps in a library, would seem to have succeeded.
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and comes_from_signal_handler(error):
            raise
        frames = list(traceback.walk_tb(error.__traceback__))
        if isinstance(error, ConfigError) and frames[-1][0].f_globals["__name__"] == __name__:
            raise  # The message already names the place.
        raise _located(error, frames, path) from (error if _is_raised_elsewhere(frames) else None)


def as_config(value: Any, whose: str) -> Any:
    """A dict as a `DictConfig` that may contain objects; other values unchanged. Errors name `whose` value it is."""
    try:
        return DictConfig(value, flags={"allow_objects": True}) if isinstance(value, dict) else value
    except (OmegaConfBaseException, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{whose} cannot be a section of a config: {reason}") from None


def files_near(path: str, suffixes: tuple[str, ...] = (".py", ".yaml", ".yml")) -> str:
    """A sentence for the message about a file that does not exist: similar or other files in its folder."""
    folder = os.path.dirname(os.path.abspath(path))
    found = os.listdir(folder) if os.path.isdir(folder) else []
    names = sorted(name for name in found if name.endswith(suffixes) and not name.startswith("_"))
    listed = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    return nearest(os.path.basename(path), names) or f" Config files in {folder}: {listed or 'none'}."


def _located(error: BaseException, frames: Sequence[tuple[types.FrameType, int]], path: str) -> ConfigError:
    """The error with the last file and line of a config in its traceback."""
    text = str(error) if isinstance(error, DataPipelineError) else error_text(error)
    place = path
    for frame, line in frames:
        if _module_of(frame).startswith(CONFIG_MODULE_PREFIX):
            place = f"{frame.f_code.co_filename}, line {line}"
    return (ConfigImportError if isinstance(error, ImportError) else ConfigError)(f"{place}: {text}")


def _is_raised_elsewhere(frames: Sequence[tuple[types.FrameType, int]]) -> bool:
    """Whether the error comes from a module of the user, so that the user also needs its traceback."""
    exits = getattr(sys.exit, "__code__", None)  # OneFlow replaces `sys.exit`.
    packages = [_module_of(frame).partition(".")[0] for frame, _ in frames if frame.f_code is not exits]
    return any(not name.startswith((CONFIG_MODULE_PREFIX, *_NO_USERS)) for name in packages)


def _module_of(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _run(path: str, importers: tuple[str, ...]) -> types.ModuleType:
    if path in importers:
        circle = " imports ".join([*importers[importers.index(path) :], path])
        raise ConfigImportError(f"Config files import each other in a circle: {circle}.")
    module = types.ModuleType(f"{CONFIG_MODULE_PREFIX}{next(_numbers)}")
    module.__file__ = path
    # The interpreter looks up __import__ in the builtins of the running namespace. Only this file gets its own
    # __import__; the imports of other modules and threads do not change.
    module.__dict__["__builtins__"] = {**builtins.__dict__, "__import__": _importer(path, (*importers, path))}
    code = _compile(path)
    # While the file runs, the module is in sys.modules, because dataclasses look up their module there.
    sys.modules[module.__name__] = module
    try:
        exec(code, module.__dict__)
    finally:
        del sys.modules[module.__name__]
    return module


def _compile(path: str) -> types.CodeType:
    try:
        with open(path, "rb") as file:
            return compile(file.read(), path, "exec", dont_inherit=True)
    except OSError as error:
        raise ConfigError(f"The config file {path} cannot be read: {error_text(error)}") from None
    except SyntaxError as error:
        text = f": {error.text.strip()}" if error.text else ""
        raise ConfigError(f"{error.filename or path}, line {error.lineno}: {error.msg}{text}") from None
    except ValueError as error:  # such as a NUL byte
        raise ConfigError(f"{path} is not a Python file: {error}") from None


def _importer(path: str, importers: tuple[str, ...]) -> Any:
    """The `__import__` of one config file."""

    def import_(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        if level == 0:
            module = builtins.__import__(name, globals, locals, fromlist or (), 0)
            return _with_copied_configs(module, fromlist or ())
        return _import_relative(path, importers, name, fromlist or (), level)

    return import_


def _import_relative(
    path: str, importers: tuple[str, ...], name: str, fromlist: Sequence[str], level: int
) -> types.ModuleType:
    folder = os.path.dirname(path)
    for _ in range(level - 1):
        folder = os.path.dirname(folder)
    base = os.path.join(folder, *name.split(".")) if name else folder
    statement = f"from {'.' * level}{name} import {', '.join(fromlist)}"
    file = _module_file(base) if name else _folder_file(base)
    if file is None and not os.path.isdir(base):
        raise ConfigImportError(
            f"{path} says `{statement}`, but there is neither {base}.py nor {os.path.join(base, '__init__.py')}."
            + files_near(f"{base}.py", (".py",))
        )
    # If the folder's __init__.py is still running, its other files can be imported, as in Python.
    is_running_folder = file in importers and file == _folder_file(base)
    module = types.ModuleType(name) if file is None or is_running_folder else _run(file, importers)
    for wanted in _public_names(module) if "*" in fromlist else fromlist:
        if not hasattr(module, wanted):
            neighbour = _module_file(os.path.join(base, wanted)) if os.path.isdir(base) else None
            if neighbour is None:
                hint = nearest(wanted, _public_names(module))
                if os.path.isdir(base):
                    hint = hint or files_near(os.path.join(base, wanted), (".py",))
                raise ConfigImportError(f"{path} says `{statement}`, but {file or base} defines no {wanted!r}.{hint}")
            found = _run(neighbour, importers)
            found.__dict__.update(
                {name: as_config(getattr(found, name), f"{name} of {neighbour}") for name in _public_names(found)}
            )
            setattr(module, wanted, found)
        setattr(module, wanted, as_config(getattr(module, wanted), f"{wanted} of {file or base}"))
    return module


def _module_file(base: str) -> str | None:
    return os.path.abspath(f"{base}.py") if os.path.isfile(f"{base}.py") else _folder_file(base)


def _folder_file(folder: str) -> str | None:
    file = os.path.join(os.path.abspath(folder), "__init__.py")
    return file if os.path.isfile(file) else None


def _public_names(module: types.ModuleType) -> Sequence[str]:
    declared = getattr(module, "__all__", None)
    return list(declared) if declared is not None else [name for name in vars(module) if not name.startswith("_")]


def _with_copied_configs(module: Any, fromlist: Sequence[str]) -> Any:
    """A package's module with copies of the imported configs, because all loads share the module's own configs."""
    names = _public_names(module) if "*" in fromlist else fromlist
    values = {name: vars(module).get(name) for name in names}
    configs = {name: value for name, value in values.items() if isinstance(value, (DictConfig, ListConfig))}
    if not configs:
        return module
    shown = types.ModuleType(module.__name__)
    shown.__dict__.update(vars(module))
    for name in fromlist:
        if name != "*":
            setattr(shown, name, getattr(module, name))
    shown.__dict__.update({name: copy.deepcopy(config) for name, config in configs.items()})
    return shown
