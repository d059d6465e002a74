"""Loads, changes and saves config files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Union

from omegaconf import DictConfig, ListConfig, OmegaConf

from libai_data.atomic_files import written_whole
from libai_data.config.config_files import as_config, files_near, run_config_file
from libai_data.config.naming import describe, dotted_name
from libai_data.config.overrides import apply_overrides
from libai_data.config.signatures import TARGET
from libai_data.config.yaml_format import from_yaml, to_yaml
from libai_data.errors import ConfigError, error_text, nearest
from libai_data.errors.argument_rules import OUTPUT_FILE, check
from libai_data.errors.working_directory import working_directory

Keys = Union[None, str, Sequence[str]]
Path = Union[str, "os.PathLike[str]"]
_WIDTH = 88  # characters in a line of `to_py`
# The package's configs import the engine, so they are in its folder.
_PACKAGED = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "engine", "configs")


class LazyConfig:
    """Loads, changes and saves configs whose objects are built later.

    A config file is Python (or YAML). Dicts and configs at its top level are the config, except names that
    start with an underscore.

    Example:

        cfg = LazyConfig.load("configs/vit_digits.py")
        cfg = LazyConfig.apply_overrides(cfg, ["train.train_iter=100", "optim.lr=1e-3"])
        LazyConfig.save(cfg, "output/config.yaml")
    """

    @staticmethod
    def load(filename: Path, keys: Keys = None) -> Any:
        """Loads a config file.

        Python files may import other config files relatively (`from .common.train import train`) and packages
        absolutely. Each load runs the files again. YAML files are read safely: see `libai_data.config.yaml_format`.

        Args:
            filename: a `.py`, `.yaml` or `.yml` file; a relative path starts at the working directory.
            keys: one name, or several names, whose values to return; by default the whole config.

        Returns:
            A `DictConfig` with the configs that the file defines; for one key its value, for several keys a tuple.

        Raises:
            ConfigError: there is no such file (the message lists other files), the file is malformed (the message
                has the line), or the file does not define a key.
        """
        path = _existing_file(os.fspath(filename))
        values = run_config_file(path) if path.endswith(".py") else _read_yaml(path)
        if isinstance(keys, str):
            return _pick(values, keys, path)
        if keys is not None:
            return tuple(_pick(values, key, path) for key in keys)
        if path.endswith(".py"):
            values = {
                name: as_config(value, f"{name} of {path}")
                for name, value in values.items()
                if isinstance(value, (DictConfig, ListConfig, dict)) and not name.startswith("_")
            }
        return as_config(dict(values), path)

    @staticmethod
    def load_rel(filename: Path, keys: Keys = None) -> Any:
        """Loads a config file whose path is relative to the file that calls this; see `load`.

        Raises:
            ConfigError: as for `load`; or the caller's code is not in a file.
        """
        caller = sys._getframe(1).f_code.co_filename
        if not os.path.isfile(caller):
            raise ConfigError(f"load_rel({filename!r}) is called from {caller}, which is not a file; use load instead.")
        return LazyConfig.load(os.path.join(os.path.dirname(os.path.abspath(caller)), os.fspath(filename)), keys)

    @staticmethod
    def save(cfg: Any, filename: Path) -> None:
        """Saves a config as YAML; the file is written completely or not at all.

        Loading the file gives an equal config, because callables are written by their dotted names. A callable without
        a dotted name (a lambda, a nested function) is written as a note, with a warning. Loading this note is an error.

        Args:
            filename: the YAML file to write; its folder is created if needed.
        """
        check({"filename": OUTPUT_FILE}, filename=filename)
        path = os.path.abspath(os.fspath(filename))
        text = to_yaml(cfg)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with written_whole(path) as unfinished:
            unfinished.write_bytes(text.encode("utf-8"))

    @staticmethod
    def apply_overrides(cfg: DictConfig, overrides: list[str] | None) -> DictConfig:
        """Changes a config in place by `key=value` texts; see `libai_data.config.overrides.apply_overrides`."""
        return apply_overrides(cfg, overrides or [])

    @staticmethod
    def to_py(cfg: Any, prefix: str = "cfg.") -> str:
        """A config as Python-like text for people to read; for programs, use `save`.

        Keys are sorted, references are resolved, and callables are shown by their dotted names.

        Args:
            prefix: prefix of each key's name.
        """
        return "".join(f"{line}\n" for line in _statements(OmegaConf.to_container(cfg, resolve=True), prefix))


def _existing_file(filename: str) -> str:
    path = os.path.abspath(os.path.expanduser(filename))
    if os.path.isdir(path):
        raise ConfigError(f"The config file {filename!r} is a folder.{files_near(os.path.join(path, 'x'))}")
    if os.path.splitext(path)[1] not in (".py", ".yaml", ".yml"):
        raise ConfigError(f"The config file {filename!r} must end in .py, .yaml or .yml.{files_near(path)}")
    if not os.path.isfile(path):
        raise ConfigError(f"The config file {filename!r} does not exist: tried {path}.{files_near(path)}")
    return path


def _read_yaml(path: str) -> Mapping[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise ConfigError(f"The config file {path} cannot be read: {error_text(error)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file in UTF-8: {error}") from None
    values = from_yaml(text, path)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must be a mapping of sections at its top level; it is a {type(values).__name__}.")
    return values


def _pick(values: Mapping[str, Any], key: str, path: str) -> Any:
    if key not in values:
        known: tuple[str, ...] = tuple(name for name in values if not str(name).startswith("_"))
        raise ConfigError(f"{path} defines no {key!r}.{nearest(key, known) or ' It defines: ' + ', '.join(known)}")
    return as_config(values[key], f"{key} of {path}")


def get_config(config_path: str) -> Any:
    """Load a config of this package, as LiBai's function of the same name: `get_config("common/train.py").train`.

    Each call loads the file again. A folder `configs` in the working directory is not used.

    Args:
        config_path: path in the folder of the package's configs: `common/train.py`, `common/optim.py`,
            `common/models/graph.py`, `common/data/cifar100.py` or `common/data/imagenet.py`.

    Raises:
        ConfigError: there is no such config; the message lists other configs.
    """
    return LazyConfig.load(os.path.join(_PACKAGED, config_path))


def load_config(config_file: str, overrides: Sequence[str] = ()) -> Any:
    """Load a config and change it, as the training command does."""
    # Configs may import other configs and the user's modules from the working directory.
    folder = working_directory()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return LazyConfig.apply_overrides(LazyConfig.load(config_file), list(overrides))


def _statements(section: Mapping[Any, Any], prefix: str) -> Iterator[str]:
    for key in sorted(section, key=str):
        name = f"{prefix}{key}" if str(key).isidentifier() else f"{prefix.rstrip('.')}[{_flat(key)}]"
        value = section[key]
        if isinstance(value, Mapping) and value and TARGET not in value:
            yield from _statements(value, f"{name}.")
        else:
            yield f"{name} = {_expression(value, 0, len(name) + 3)}"


def _expression(value: Any, indent: int, used: int) -> str:
    """The text of a value: one line, or a line for each argument or element if one line would be too long."""
    flat = _flat(value)
    opening, items, closing = _parts(value)
    if not items or indent + used + len(flat) <= _WIDTH:
        return flat
    blank = " " * indent
    lines = [f"{blank}    {head}{_expression(item, indent + 4, len(head) + 1)},\n" for head, item in items]
    return f"{opening}\n{''.join(lines)}{blank}{closing}"


def _flat(value: Any) -> str:
    opening, items, closing = _parts(value)
    return opening + ", ".join(f"{head}{_flat(item)}" for head, item in items) + closing


def _parts(value: Any) -> tuple[str, list[tuple[str, Any]], str]:
    """The opening text of a value, its items as (text before the item, item), and the closing text."""
    if isinstance(value, Mapping) and TARGET in value:
        arguments = [(f"{key}=", value[key]) for key in sorted(value, key=str) if key != TARGET]
        return f"{describe(value[TARGET])}(", arguments, ")"
    if isinstance(value, Mapping):
        return "{", [(f"{_flat(key)}: ", value[key]) for key in sorted(value, key=str)], "}"
    if isinstance(value, list):
        return "[", [("", item) for item in value], "]"
    if isinstance(value, str):
        text = repr(value)
        return (text if '"' in text else f'"{text[1:-1]}"'), [], ""
    return dotted_name(value) or repr(value), [], ""
