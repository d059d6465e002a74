"""Places in a config: a section, and a key that it has or may get."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from libai_data.config.keys import every_key, join_path
from libai_data.config.naming import describe
from libai_data.config.signatures import SPECIAL_KEYS, Parameters, parameters_of, target_of
from libai_data.errors import ConfigError, ConfigKeyError, nearest

NO_PARAMETERS = Parameters((), frozenset(), frozenset(), takes_any=False)


@dataclass(frozen=True)
class Place:
    """A key in a section or list of a config; it need not be there yet."""

    root: DictConfig
    section: DictConfig | ListConfig
    path: str  # the section's own dotted key
    key: str | int

    @property
    def full_key(self) -> str:
        """The dotted key from the top of the config."""
        return join_path(self.path, self.key)

    @property
    def exists(self) -> bool:
        """Whether the config has the key, whatever its value."""
        if isinstance(self.section, ListConfig):
            return isinstance(self.key, int) and self.key < len(self.section)
        return self.key in self.section.keys()  # noqa: SIM118 - `in` denies keys whose value is open or refers to nothing

    @property
    def written_value(self) -> Any:
        """The value, or None where there is none yet: no key, an open value, or a reference to another key."""
        if not self.exists or self._refers or OmegaConf.is_missing(self.section, self.key):
            return None
        return self.section[self.key]

    @property
    def value(self) -> Any:
        """The value, found through a reference if need be; None where there is none."""
        return self.section[self.key] if self.exists and self._refers else self.written_value

    @property
    def _refers(self) -> bool:
        return bool(OmegaConf.is_interpolation(self.section, self.key))

    def takes_argument(self) -> bool:
        """Whether the section is a LazyCall of a target that takes this key as an argument."""
        return (self.key in SPECIAL_KEYS and "_target_" in self.section) or self._parameters().accepts(str(self.key))

    def put(self, value: Any) -> None:
        """Sets the value, adding the key when it is not there; in a list, the place after the last can be added."""
        if isinstance(self.section, ListConfig):
            if self.key == len(self.section):
                self.section.append(value)
                return
            if not self.exists:
                raise self.unknown()
        with _opened(self.section):
            self.section[self.key] = value

    def delete(self) -> None:
        """Removes the key, or the element from the list."""
        with _opened(self.section):
            del self.section[self.key]

    def unknown(self) -> ConfigKeyError:
        """The error for a key that is not there, with what was probably meant."""
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
        return NO_PARAMETERS if target is None else parameters_of(target)


def place_of(root: DictConfig, section: DictConfig | ListConfig, path: str, part: str) -> Place:
    """The place that one part of a dotted key means in a section: a name, or an index into a list."""
    if isinstance(section, ListConfig):
        if not part.isdigit():
            raise ConfigError(f"{path} is a list, whose elements are {path}.0 and so on; found {part!r}.")
        return Place(root, section, path, int(part))
    is_number = part.lstrip("-").isdigit() and part not in section and int(part) in section
    return Place(root, section, path, int(part) if is_number else part)


def _opened(section: Any) -> Any:
    return open_dict(section) if isinstance(section, DictConfig) else contextlib.nullcontext()
