"""Finding keys in a config, and refusing those that nobody reads."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigTypeError, InterpolationResolutionError

from libai_data.errors import ConfigError, nearest

_ABSENT = object()


def try_get_key(cfg: DictConfig, *keys: str, default: Any = None) -> Any:
    """The value of the first of `keys` that the config has.

    Args:
        cfg: a config or a section of one.
        keys: dotted keys, such as `"train.dist.tensor_parallel_size"`, in the order to try.
        default: what to return when the config has none of them.

    Returns:
        The value, which may be None when the config says so, else `default`.

    Raises:
        ConfigError: the value is an interpolation (`${...}`) of a key that does not exist.
    """
    for key in keys:
        try:
            value = OmegaConf.select(cfg, key, default=_ABSENT)
        except ConfigTypeError:  # a name where a list wants an index
            continue
        except InterpolationResolutionError as error:
            raise ConfigError(f"The config's {key} refers to what is not there: {error}") from error
        if value is not _ABSENT:
            return value
    return default


def check_keys(cfg: Mapping[str, Any], reference: Mapping[str, Any], path: str = "", also: Iterable[str] = ()) -> None:
    """Refuses keys of a section that its reference does not have, with what was probably meant.

    Sections are compared all the way down, except where the reference has None or a LazyCall: there the config
    may put what it likes. Values are not compared, but a plain value where the reference has a section is refused.

    Args:
        cfg: the section that a user wrote, e.g. `cfg.train`.
        reference: a section with every key that is read, e.g. `default_train()`.
        path: the section's own key, for the messages, e.g. `"train"`.
        also: further keys that are known, dotted and relative to the section.

    Raises:
        ConfigError: naming every unknown key, each with the nearest known one.
    """
    known_elsewhere = _index_by_last_part(reference)
    problems = list(_problems(cfg, reference, path, frozenset(also), "", known_elsewhere))
    if problems:
        raise ConfigError("\n".join(problems))


def join_path(path: str, key: object) -> str:
    """`path.key`, or the key alone at the top of a config."""
    return f"{path}.{key}" if path else str(key)


def path_of(node: Any) -> str:
    """The dotted key of a section or list within its config; "" for anything else."""
    parts: list[str] = []
    while isinstance(node, (DictConfig, ListConfig)) and node._key() is not None:
        parts.insert(0, str(node._key()))
        node = node._get_parent()
    return ".".join(parts)


def _problems(
    cfg: Mapping[str, Any],
    reference: Mapping[str, Any],
    path: str,
    also: frozenset,
    inside: str,
    known_elsewhere: dict[str, list[str]],
) -> Iterator[str]:
    if not isinstance(cfg, (abc.Mapping, DictConfig)):
        yield f"{path} must be a section with the keys {_listing(reference)}; found {cfg!r}."
        return
    for key in cfg:
        full_key, relative = join_path(path, key), join_path(inside, key)
        if relative in also:
            continue
        if key not in reference:
            root = path[: len(path) - len(inside)].rstrip(".")
            yield f"Unknown key {full_key}." + _hint(str(key), reference, also, inside, root, known_elsewhere)
            continue
        expected = reference[key]
        if not _is_plain_section(expected) or _is_interpolation(cfg, key):
            continue
        yield from _problems(cfg[key], expected, full_key, also, relative, known_elsewhere)


def _hint(
    key: str,
    reference: Mapping[str, Any],
    also: frozenset,
    inside: str,
    root: str,
    known_elsewhere: dict[str, list[str]],
) -> str:
    prefix = f"{inside}." if inside else ""
    siblings = [str(k) for k in reference] + [k[len(prefix) :] for k in also if k.startswith(prefix)]
    elsewhere = known_elsewhere.get(key, [])
    if elsewhere:
        return f" It belongs at {' or '.join(join_path(root, place) for place in elsewhere)}."
    return nearest(key, siblings) or f" Known keys here: {_listing(reference)}."


def _index_by_last_part(reference: Mapping[str, Any]) -> dict[str, list[str]]:
    """The last part of each key -> the dotted keys that end so, but for those like 'enabled' that are everywhere."""
    places: dict[str, list[str]] = {}
    for dotted, last in _walk(reference, ""):
        places.setdefault(last, []).append(dotted)
    return {last: dotted for last, dotted in places.items() if len(dotted) <= 2}


def _walk(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in section.items():
        dotted = join_path(prefix, key)
        yield dotted, str(key)
        if _is_plain_section(value):
            yield from _walk(value, dotted)


def _is_plain_section(value: Any) -> bool:
    return isinstance(value, (abc.Mapping, DictConfig)) and "_target_" not in value and len(value) > 0


def _is_interpolation(cfg: Mapping[str, Any], key: object | None) -> bool:
    return isinstance(cfg, DictConfig) and OmegaConf.is_interpolation(cfg, key)


def _listing(section: Mapping[str, Any]) -> str:
    return ", ".join(str(key) for key in section)
