"""Writes and reads configs as YAML; reading a written config gives an equal config, and calls nothing.

Three tags extend plain YAML: `!name package.thing` is the object of that dotted name (a function, class, enum member or
dtype), `!path text` is a `pathlib.Path`, and `!unsaved text` is a value that could not be written. Reading imports the
named modules.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import pathlib
from typing import Any

import numpy as np
import yaml
from omegaconf import Node, OmegaConf
from omegaconf._utils import get_yaml_loader

from libai_data.config.keys import join_path
from libai_data.config.naming import describe, dotted_name, locate
from libai_data.config.signatures import TARGET
from libai_data.errors import ConfigError

logger = logging.getLogger(__name__)

_SCALARS = (str, bool, int, float, bytes, type(None))


@dataclasses.dataclass(frozen=True)
class _Named:
    name: str


@dataclasses.dataclass(frozen=True)
class _Unsaved:
    text: str


def to_yaml(cfg: Any) -> str:
    """The YAML text of a config, or of a plain dict or list.

    Targets are written as dotted names, other objects that have a dotted name with `!name`, dataclass instances as
    LazyCalls of their class, and numpy scalars as plain numbers. Interpolations are not resolved. An object without
    a name (a lambda, a nested function, an array) is written as `!unsaved`, and a warning is logged.
    """
    unsaved: list[str] = []
    plain = _plain(cfg, "", unsaved)
    for line in unsaved:
        logger.warning("The saved config cannot be loaded back as it is: %s", line)
    return str(
        yaml.dump(plain, Dumper=_Dumper, default_flow_style=None, allow_unicode=True, width=120, sort_keys=False)
    )


def from_yaml(text: str, origin: str) -> Any:
    """The plain dicts, lists and values of a YAML text of the file `origin`; a ConfigError if it is not valid."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{origin}{line}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{origin} is not valid YAML: {error}") from None


def _plain(value: Any, path: str, unsaved: list[str]) -> Any:
    if isinstance(value, Node):
        value = _as_written(value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = {TARGET: type(value), **value._asdict()}
    elif dataclasses.is_dataclass(value) and not isinstance(value, (type, enum.Enum)):
        value = {TARGET: type(value), **{f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}}
    if isinstance(value, dict):
        plain: dict[Any, Any] = {}
        for key, item in value.items():
            where = join_path(path, key)
            written = _plain(item, where, unsaved)
            is_target = key == TARGET and isinstance(written, _Named)
            plain[_plain(key, where, unsaved)] = written.name if is_target else written
        return plain
    if isinstance(value, (list, tuple)):
        return [_plain(item, join_path(path, index), unsaved) for index, item in enumerate(value)]
    if isinstance(value, np.generic):
        return value.item()
    # Not an IntEnum, which is a number too.
    return value if type(value) in _SCALARS or isinstance(value, pathlib.PurePath) else _named(value, path, unsaved)


def _as_written(node: Node) -> Any:
    """What a node of a config contains: a text for an interpolation, and nodes for the parts of a section or list."""
    content = node._value()
    kind = OmegaConf.get_type(node)
    if isinstance(content, dict) and dataclasses.is_dataclass(kind):
        given = [field.name for field in dataclasses.fields(kind) if field.init]
        return {TARGET: kind, **{name: content[name] for name in given if name in content}}
    return content


def _named(value: Any, path: str, unsaved: list[str]) -> Any:
    name = dotted_name(value)
    if name is not None:
        return _Named(name)
    reason = f"{describe(value)} has no importable name"
    advice = "define it at the top of an importable module" if callable(value) else "write it as a LazyCall"
    unsaved.append(f"{path}: {reason}; {advice}.")
    return _Unsaved(reason)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


# This SafeLoader refuses keys that are set twice. PyYAML's own loaders implement YAML 1.1, which reads 1e-4 as text and
# 2024-01-01 as a date. In configs, they are a number and text.
_Loader: Any = get_yaml_loader()


def _construct_name(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    try:
        return locate(loader.construct_scalar(node))
    except ConfigError as error:
        raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error


def _construct_unsaved(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    raise yaml.constructor.ConstructorError(
        None,
        None,
        f"this value could not be saved ({loader.construct_scalar(node)}); write it again, or load the config file "
        "that the run was started with",
        node.start_mark,
    )


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # Without quotes, YAML would read these Unicode line breaks back as spaces.
    style = '"' if any(mark in text for mark in "\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(_Named, lambda dumper, data: dumper.represent_scalar("!name", data.name))
_Dumper.add_representer(_Unsaved, lambda dumper, data: dumper.represent_scalar("!unsaved", data.text))
_Dumper.add_multi_representer(pathlib.PurePath, lambda dumper, data: dumper.represent_scalar("!path", str(data)))
_Loader.add_constructor("!name", _construct_name)
_Loader.add_constructor("!path", lambda loader, node: pathlib.Path(loader.construct_scalar(node)))
_Loader.add_constructor("!unsaved", _construct_unsaved)
