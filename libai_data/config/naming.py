"""Converts objects to dotted names, and dotted names to objects."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

from libai_data.errors import ConfigError, error_text, nearest

CONFIG_MODULE_PREFIX = "_libai_data_config_file_"
"""Prefix of the module name of a config file. Such a module exists only while the file is loaded."""


def locate(name: str) -> Any:
    """The object of a name such as "oneflow.optim.AdamW", whose module is imported if needed; or a ConfigError."""
    parts = name.split(".")
    if not all(parts):
        raise ConfigError(f"{name!r} is not a dotted name of the form package.module.attribute.")
    found = _import(parts[0], name)
    for end in range(2, len(parts) + 1):
        so_far, part = ".".join(parts[: end - 1]), parts[end - 1]
        try:
            found = getattr(found, part)
        except AttributeError:
            if not inspect.ismodule(found):
                raise ConfigError(
                    f"Cannot find {name!r}: {so_far} has no {part!r}.{nearest(part, dir(found))}"
                ) from None
            found = _import(f"{so_far}.{part}", name, among=dir(found))
    return found


def dotted_name(obj: Any) -> str | None:
    """The shortest dotted name by which `locate` finds the same object in another process, or None.

    Classes, functions, methods of classes, members of enums, and dtypes (such as `oneflow.float32`) have such a name.
    Lambdas, nested functions and objects that a config file defines have none.
    """
    return next((name for name in _candidates(obj) if _is_found_as(name, obj)), None)


def describe(obj: Any) -> str:
    """An object's name for a message: its dotted name, or else its kind and the place of its definition."""
    name = obj if isinstance(obj, str) else dotted_name(obj)
    if name is not None:
        return str(name)
    code = getattr(obj, "__code__", None)
    kind = getattr(obj, "__qualname__", type(obj).__qualname__)
    if isinstance(code, CodeType):  # `types.FunctionType` has a descriptor of this name.
        return f"{kind} ({code.co_filename}, line {code.co_firstlineno})"
    return str(kind)


def _import(module: str, name: str, among: list | None = None) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise ConfigError(f"Cannot find {name!r}: importing {module} failed: {error}.") from error
        parent, _, last = module.rpartition(".")
        if parent:
            raise ConfigError(f"Cannot find {name!r}: {parent} has no {last!r}.{nearest(last, among or [])}") from None
        raise ConfigError(
            f"Cannot find {name!r}: there is no module {module!r}.{nearest(module, list(sys.modules))} "
            "Is its folder on the PYTHONPATH?"
        ) from None
    except Exception as error:
        raise ConfigError(f"Cannot find {name!r}: importing {module} failed: {error_text(error)}") from error


def _candidates(obj: Any) -> Iterator[str]:
    module, qualname = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    enum_name = getattr(obj, "_name_", None)
    if enum_name is not None and qualname is None:
        module, qualname = type(obj).__module__, f"{type(obj).__qualname__}.{enum_name}"
    if isinstance(module, str) and isinstance(qualname, str):
        if "<" in qualname or module.startswith(CONFIG_MODULE_PREFIX):
            return
        # `package.Thing` is shorter than `package._impl.thing.Thing`, and stays valid if the implementation moves.
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            yield ".".join([*parts[:end], qualname])
    elif type(obj).__name__ == "dtype":
        # Call repr for dtypes only: the repr of a global tensor makes all ranks communicate.
        yield repr(obj)


def _is_found_as(name: str, obj: Any) -> bool:
    """Whether a name finds the object in the modules that are already imported; the object's own module is."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:end]))
        if found is None:
            continue
        try:
            for part in parts[end:]:
                found = getattr(found, part)
        except (AttributeError, ImportError):
            return False
        # A method is a new object at each access.
        return found is obj or (inspect.ismethod(obj) and found == obj)
    return False
