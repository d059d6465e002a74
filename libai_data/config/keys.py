"""Finds keys in a config, and raises errors for keys that no code reads."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, Callable

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigTypeError, InterpolationResolutionError

from libai_data.errors import ConfigError, nearest

_ABSENT = object()


def try_get_key(cfg: DictConfig, *keys: str, default: Any = None) -> Any:
    """The value of the first of `keys` that the config has.

    Args:
        keys: dotted keys, such as `"train.dist.tensor_parallel_size"`, in the order to try.

    Returns:
        The value, which may be None in the config; `default` if the config has none of the keys.

    Raises:
        ConfigError: the value is an interpolation (`${...}`) of a key that does not exist.
    """
    for key in keys:
        try:
            value = OmegaConf.select(cfg, key, default=_ABSENT)
        except ConfigTypeError:  # the key has a name where a list needs an index
            continue
        except InterpolationResolutionError as error:
            raise ConfigError(f"The config's {key} refers to a key that does not exist: {error}") from None
        if value is not _ABSENT:
            return value
    return default


def check_keys(cfg: Mapping[str, Any], reference: Mapping[str, Any], path: str = "", also: Iterable[str] = ()) -> None:
    """Rejects keys of a section that its reference does not have, and suggests the nearest key.

    Sections within the section are compared too. If the reference has None or a LazyCall for a key, every value is
    allowed. Values are not compared, but a plain value is an error if the reference has a section.

    Args:
        cfg: the section that a user wrote, e.g. `cfg.train`.
        reference: a section with every key that is read, e.g. `default_train()`.
        path: the section's key, for the messages, e.g. `"train"`.
        also: further keys that are known, dotted and relative to the section.

    Raises:
        ConfigError: there are unknown keys; the message names each, with the nearest known key.
    """

    def known() -> list[str]:
        return [dotted for dotted, _ in every_key(DictConfig(reference, flags={"allow_objects": True}), path)]

    problems = list(_problems(cfg, reference, path, known, {join_path(path, key) for key in also}))
    if problems:
        raise ConfigError("\n".join(problems))


def join_path(path: str, key: object) -> str:
    """`path.key`, or the key alone at the top of a config."""
    return f"{path}.{key}" if path else str(key)


def every_key(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each dotted key below a section or list, with its value; None if the key is open or refers to another key."""
    for key in node if isinstance(node, DictConfig) else range(len(node)) if isinstance(node, ListConfig) else ():
        is_open = OmegaConf.is_interpolation(node, key) or OmegaConf.is_missing(node, key)
        value, where = None if is_open else node[key], join_path(path, key)
        yield where, value
        yield from every_key(value, where)


def path_of(node: Any) -> str:
    """The dotted key of a section or list within its config; "" for anything else."""
    parts: list[str] = []
    while isinstance(node, (DictConfig, ListConfig)) and node._key() is not None:
        parts.insert(0, str(node._key()))
        node = node._get_parent()
    return ".".join(parts)


def _problems(
    cfg: Any, reference: Mapping[str, Any], path: str, known: Callable[[], list[str]], also: Set[str]
) -> Iterator[str]:
    """What is wrong with a section; `known` gives all keys of the reference, and `also` more keys from the top."""
    if not isinstance(cfg, (abc.Mapping, DictConfig)):
        yield f"{path} must be a section with the keys {_listing(reference)}; found {cfg!r}."
        return
    for key in cfg:
        where = join_path(path, key)
        if where in also:
            continue
        if key not in reference:
            elsewhere = [dotted for dotted in known() if dotted.split(".")[-1] == key]
            if 1 <= len(elsewhere) <= 2:  # keys such as 'enabled' are in many sections, so a hint would not help
                hint = f" It belongs at {' or '.join(elsewhere)}."
            else:
                siblings = [
                    *map(str, reference),
                    *(name[len(path) + 1 :] for name in also if name.startswith(f"{path}.")),
                ]
                hint = nearest(str(key), siblings) or f" Known keys here: {_listing(reference)}."
            yield f"Unknown key {where}.{hint}"
        elif _is_plain_section(reference[key]) and not (
            isinstance(cfg, DictConfig) and OmegaConf.is_interpolation(cfg, key)
        ):
            yield from _problems(cfg[key], reference[key], where, known, also)


def _is_plain_section(value: Any) -> bool:
    return isinstance(value, (abc.Mapping, DictConfig)) and "_target_" not in value and len(value) > 0


def _listing(section: Mapping[str, Any]) -> str:
    return ", ".join(str(key) for key in section)
