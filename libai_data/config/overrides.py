"""Changes a config by texts such as `train.train_iter=100`, in Hydra's override grammar.

    key=value      changes an existing key, or sets an argument of a LazyCall's target
    +key=value     adds a key
    ++key=value    changes or adds a key
    ~key           deletes a key

Keys are dotted. Elements of lists have an index: `dataloader.test.0.num_workers`, or `dataloader.test[0].num_workers`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from libai_data.config.defaults import SECTION_NAMES
from libai_data.config.keys import every_key, join_path
from libai_data.config.naming import describe, locate
from libai_data.config.signatures import SPECIAL_KEYS, TARGET, Parameters, parameters_of, target_of
from libai_data.errors import ConfigError, ConfigKeyError, nearest
from libai_data.errors.argument_rules import Rule, check, list_of

_HAS_OVERRIDES = "has_overrides"
_INDEX = re.compile(r"\[(\d+)\]")
_RULES = {
    "cfg": Rule("a DictConfig, as LazyConfig.load returns", lambda value: isinstance(value, DictConfig)),
    "overrides": list_of(str, "texts such as ['train.seed=1']"),
}
_NO_PARAMETERS = Parameters(frozenset(), takes_any=False)


def apply_overrides(cfg: DictConfig, overrides: list[str]) -> DictConfig:
    """Applies overrides in order, in place; returns the same config.

    A key that the config does not have is an error. Only arguments of a LazyCall's target may be set without `+`. A
    mapping as the value is merged into a section; lists are replaced as a whole.

    Args:
        overrides: texts in Hydra's override grammar (values: null, true, 1, 1e-4, text, 'quoted', [1,2], {a: 1}).
    """
    check(_RULES, cfg=cfg, overrides=overrides)
    # Hydra's parser is slow to import, and most processes never need it.
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    opened: set[str] = set()
    for text in overrides:
        try:
            _apply(cfg, _parse(parser, text), opened)
        except ConfigError as error:
            raise type(error)(f"Override {text!r}: {error}") from error.__cause__
        except OmegaConfBaseException as error:
            raise ConfigError(f"Override {text!r}: {error}") from None
    cfg._set_flag(_HAS_OVERRIDES, True)
    return cfg


def has_overrides(cfg: DictConfig) -> bool:
    """Whether `apply_overrides` was called for a config, even with an empty list."""
    return bool(cfg._get_flag(_HAS_OVERRIDES))


def _parse(parser: Any, text: str) -> Any:
    from hydra.errors import HydraException

    if text.startswith("-"):
        raise ConfigError("this looks like an option of the command, not like a change to the config.")
    key, equals, value = text.partition("=")
    if not equals and not key.startswith("~"):
        raise ConfigError("there is no '='. Write key=value, +key=value to add a key, or ~key to delete one.")
    try:
        override = parser.parse_override(_INDEX.sub(r".\1", key) + equals + value)
    except HydraException as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{reason}. A value with special characters goes in quotes: key='\"a=b\"'.") from None
    if override.package is not None or not all(override.key_or_group.split(".")):
        raise ConfigError("the key must be names joined by dots.")
    if override.is_sweep_override():
        raise ConfigError(
            "this gives several values, but a run uses only one. A list is written [1,2], a text with commas '\"1,2\"'."
        )
    return override


def _apply(cfg: DictConfig, override: Any, opened: set[str]) -> None:
    parts, value = override.key_or_group.split("."), override.value()
    if override.is_delete():
        _delete(_descend(cfg, parts), value)
    elif override.is_add():
        _reject_mistyped_section(cfg, parts[0])
        _add(_descend(cfg, parts, create=True), value)
    elif override.is_force_add():
        _force(_descend(cfg, parts, create=True), value)
    else:
        is_quoted = override.get_value_string().strip().startswith(("'", '"'))
        _change(_descend(cfg, parts, opened=opened), value, opened, is_quoted)


def _descend(cfg: DictConfig, parts: list[str], create: bool = False, opened: set[str] | None = None) -> _Place:
    """The place of a dotted key.

    Missing sections above the key are created if `create` is True, or if they are arguments of a target. The keys of
    such arguments are added to `opened`, because such a section may have any key.
    """
    place = _place_of(cfg, cfg, "", parts[0])
    for part in parts[1:]:
        if place.value is None and create:
            place.put({})
        elif place.value is None and opened is not None and place.takes_argument(opened):
            place.put({})
            opened.add(place.full_key)
        elif not place.exists:
            raise place.unknown()
        section = place.value
        if not isinstance(section, (DictConfig, ListConfig)):
            advice = f" Set it as a whole: {place.full_key}={{...}}." if section is None else ""
            raise ConfigKeyError(
                f"{place.full_key} is {_shown(section)}, not a section, so it has no key {part!r}.{advice}"
            )
        place = _place_of(cfg, section, place.full_key, part)
    return place


def _change(place: _Place, value: Any, opened: set[str], is_quoted: bool = False) -> None:
    if not place.exists and not place.takes_argument(opened):
        raise place.unknown()
    present = place.written_value
    if isinstance(value, dict) and isinstance(present, DictConfig):
        # Set the target first, because it decides which other keys are known.
        for key in sorted(value, key=lambda k: k != TARGET):
            _change(_place_of(place.root, present, place.full_key, str(key)), value[key], opened)
        return
    _check_kind(place, present, value, is_quoted)
    if callable(present) and isinstance(value, str) and place.key not in SPECIAL_KEYS and not _refers(value):
        value = locate(value)
    place.put(value)


def _check_kind(place: _Place, present: Any, value: Any, is_quoted: bool) -> None:
    """Rejects a value of another kind than the value that it replaces, because this is probably a mistake.

    A text in quotes is accepted, because the quotes show that the user wants a text.
    """
    if value is None or _refers(value):
        return
    key = place.full_key
    force = f" To set it anyway, write ++{key}=..."
    if isinstance(present, DictConfig):
        keys = [str(k) for k in present if k not in SPECIAL_KEYS]
        raise ConfigError(
            f"{key} is a section with the keys {', '.join(keys) or '(none)'}; {_shown(value)} cannot replace it. "
            f"Set one of its keys: {key}.{keys[0] if keys else 'key'}=...{force}"
        )
    if isinstance(present, ListConfig) and not isinstance(value, list):
        raise ConfigError(
            f"{key} is a list of {len(present)}; {_shown(value)} cannot replace it. "
            f"Write a list, {key}=[...], or set an element, {key}.0=...{force}"
        )
    if isinstance(present, (bool, int, float)) and isinstance(value, str) and not is_quoted:
        is_bool = isinstance(present, bool)
        raise ConfigError(
            f"{key} is {'true or false' if is_bool else 'a number'} ({_shown(present)}); found the text {value!r}."
            f"{nearest(value, ('true', 'false')) if is_bool else ''}{force}"
        )


def _reject_mistyped_section(cfg: DictConfig, name: str) -> None:
    """Rejects a new section whose name is similar to an existing section, because no code would read it."""
    sections = [key for key, value in every_key(cfg) if "." not in key and isinstance(value, DictConfig)]
    hint = "" if name in (*cfg, *SECTION_NAMES) else nearest(name, sections)
    if hint:
        raise ConfigKeyError(f"there is no section {name!r}.{hint} To add it anyway, write ++{name}...")


def _add(place: _Place, value: Any) -> None:
    present = place.written_value
    if present is not None and not (isinstance(present, DictConfig) and isinstance(value, dict)):
        raise ConfigError(
            f"{place.full_key} exists already ({_shown(present)}). Leave out the + to change it, or write ++ to change "
            "or add it."
        )
    _force(place, value)


def _force(place: _Place, value: Any) -> None:
    present = place.written_value
    if isinstance(value, dict) and isinstance(present, DictConfig):
        for key, inner in value.items():
            _force(_place_of(place.root, present, place.full_key, str(key)), inner)
    else:
        place.put(value)


def _delete(place: _Place, expected: Any) -> None:
    if not place.exists:
        raise place.unknown()
    if expected is not None and expected != place.value:
        raise ConfigError(f"{place.full_key} is {_shown(place.value)}, not {_shown(expected)}; it was not deleted.")
    with flag_override(place.section, "struct", False):
        del place.section[place.key]


def _refers(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float, str, list, dict)):
        return repr(value)
    if isinstance(value, DictConfig):
        return f"a section ({', '.join(str(key) for key in value)})"
    return str(list(value)) if isinstance(value, ListConfig) else describe(value)


@dataclass(frozen=True)
class _Place:
    """A key in a section or list of a config; the config may not have the key yet."""

    root: DictConfig
    section: DictConfig | ListConfig
    path: str  # dotted key of the section
    key: str | int

    @property
    def full_key(self) -> str:
        """The dotted key from the top of the config."""
        return join_path(self.path, self.key)

    @property
    def exists(self) -> bool:
        """Whether the config has the key, with any value."""
        if isinstance(self.section, ListConfig):
            return isinstance(self.key, int) and self.key < len(self.section)
        return self.key in self.section.keys()  # noqa: SIM118 - `in` denies keys whose value is open or refers to nothing

    @property
    def written_value(self) -> Any:
        """The value; None if the key does not exist, is open, or refers to another key."""
        if not self.exists or self._refers or OmegaConf.is_missing(self.section, self.key):
            return None
        return self.section[self.key]

    @property
    def value(self) -> Any:
        """The value, or the value of the key that it refers to; None if the key does not exist or is open."""
        return self.section[self.key] if self.exists and self._refers else self.written_value

    @property
    def _refers(self) -> bool:
        return bool(OmegaConf.is_interpolation(self.section, self.key))

    def takes_argument(self, opened: set[str]) -> bool:
        """Whether the section may have any key, or is a LazyCall whose target has an argument of this name."""
        is_special = self.key in SPECIAL_KEYS and "_target_" in self.section
        return self.path in opened or is_special or self._parameters().accepts(str(self.key))

    def put(self, value: Any) -> None:
        """Sets the value, and adds the key if needed; a list can be extended by one element at its end."""
        if isinstance(self.section, ListConfig):
            if self.key == len(self.section):
                self.section.append(value)
                return
            if not self.exists:
                raise self.unknown()
        with flag_override(self.section, "struct", False):
            self.section[self.key] = value

    def unknown(self) -> ConfigKeyError:
        """The error for a key that does not exist, with the nearest existing key."""
        if isinstance(self.section, ListConfig):
            count = len(self.section)
            allowed = f"indices 0 to {count - 1}" if count else "no elements"
            return ConfigKeyError(f"there is no {self.full_key}: {self.path} is a list with {allowed}.")
        target = target_of(self.section, self.path)
        siblings = [str(key) for key in self.section if key not in SPECIAL_KEYS] + sorted(self._parameters().names)
        hint = nearest(self.key, siblings)
        elsewhere = [dotted for dotted, _ in every_key(self.root) if dotted.split(".")[-1] == self.key]
        if not hint and 1 <= len(elsewhere) <= 3:
            hint = f" There is {' and '.join(elsewhere)}."
        if not hint:
            known = ", ".join(dict.fromkeys(siblings)) or "(none)"
            hint = f" Keys {'in ' + self.path if self.path else 'at the top'}: {known}."
        if target is not None:
            return ConfigKeyError(f"there is no key {self.full_key}: {describe(target)} has no such argument.{hint}")
        return ConfigKeyError(f"there is no key {self.full_key}.{hint} To add it, write +{self.full_key}=...")

    def _parameters(self) -> Parameters:
        target = target_of(self.section, self.path)
        return _NO_PARAMETERS if target is None else parameters_of(target)


def _place_of(root: DictConfig, section: DictConfig | ListConfig, path: str, part: str) -> _Place:
    """The place of one part of a dotted key in a section: the part is a name, or the index of a list."""
    if isinstance(section, ListConfig):
        if not part.isdigit():
            raise ConfigError(f"{path} is a list, whose elements are {path}.0 and so on; found {part!r}.")
        return _Place(root, section, path, int(part))
    is_number = part.lstrip("-").isdigit() and part not in section and int(part) in section
    return _Place(root, section, path, int(part) if is_number else part)
