"""What a training changes in attributes of users' objects: of the optimizer, the schedule, and the model's modules."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, Callable

import numpy as np

from libai_data.errors import CheckpointError
from libai_data.iterables.plain_state import decoded, encoded
from libai_data.mesh.arrays import is_flow_tensor

logger = logging.getLogger(__name__)

PLAIN = (int, float, str, np.generic, type(None))
"""Classes of the attributes of a model's modules that checkpoints hold."""


class ChangedAttributes:
    """The attributes of a user's objects that a training has changed since its first step, such as a counter.

    The others are those that the config, or code before the first step, decides. They may change before a resume.

    Args:
        owner: name of the class of the objects, for messages.
        attributes: returns name of an object -> its attributes, a dict that may be changed; the name of `owner` is "".
        besides: names of attributes that are stored in another way.
        kinds: classes of the values that count.
    """

    may_be_absent = True

    def __init__(
        self,
        owner: str,
        attributes: Callable[[], Mapping[str, dict[str, Any]]],
        besides: Collection[str],
        kinds: type | tuple[type, ...] = object,
    ) -> None:
        self._owner = owner
        self._attributes = attributes
        self._besides = besides
        self._kinds = kinds
        self._restored: set[str] = set()
        self._has_begun = False
        self._note_values()

    def _note_values(self) -> None:
        self._first = {name: text for name, (text, _) in self._found().items()}

    def note_start(self) -> None:
        """Compare with the values of now, before the first step, instead of those when this object was made."""
        if not self._has_begun:
            self._has_begun = True
            self._note_values()

    def _found(self) -> dict[str, tuple[str, Any]]:
        """Name, as OBJECT/ATTRIBUTE -> the value as text, "" if a checkpoint cannot store it, and the value."""
        found = {}
        for thing, attributes in self._attributes().items():
            for name, value in attributes.items():
                if name not in self._besides and isinstance(value, self._kinds):
                    text = ""
                    with suppress(CheckpointError):
                        text = encoded(value)
                    found[f"{thing}/{name}".lstrip("/")] = text, value
        return found

    def changed(self) -> list[str]:
        """Names of the attributes that have other values now."""
        return [name for name, (text, _) in self._found().items() if text != self._first.get(name)]

    def state_dict(self) -> dict[str, str]:
        """Name -> the new value as text; raises TypeError for tensors, and lists and dicts of other objects."""
        changed = {}
        for name, (text, value) in self._found().items():
            if text == self._first.get(name) and name not in self._restored:
                continue
            if text:
                changed[name] = text
            elif is_flow_tensor(value) or isinstance(value, (list, tuple, dict, set, deque)):
                raise TypeError(
                    f"{self._owner} changes its attribute {name!r} in the training, and checkpoints cannot store it: "
                    f"{value!r:.100}. Keep numbers or numpy arrays in it; an optimizer may also keep tensors of a "
                    "parameter's shape in self._state[parameter]"
                )  # Other objects are probably caches.
        return changed

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Set the attributes again; warn of those whose object does not exist any more."""
        objects = self._attributes()
        for name, text in state.items():
            if not isinstance(text, str):
                raise CheckpointError(f"the saved attribute {name!r} of {self._owner} is {text!r}, no text")
            thing, _, attribute = name.rpartition("/")
            if thing in objects:
                objects[thing][attribute] = decoded(text)
                self._restored.add(name)
            else:
                logger.warning(
                    f"{self._owner} had changed {name!r} to {text} in the training; this is not restored, because it "
                    "has no such part now."
                )


def changed_in_optimizer(model: Any, optimizer: Any) -> ChangedAttributes:
    """What a training has changed in an optimizer: its attributes, and options of its groups, except their rates."""
    names = {parameter: name for name, parameter in model.named_parameters()}

    def attributes() -> dict[str, dict[str, Any]]:
        found = {"": getattr(optimizer, "__dict__", {})}
        for group in optimizer.param_groups:
            if group.parameters:
                first = names.get(group.parameters[0], "?")
                found[f"group of {first} and {len(group.parameters) - 1} more"] = group.options
        return found

    # Adam computes the corrections in each step.
    besides = ("_state", "param_groups", "lr", "bias_correction1", "bias_correction2")
    return ChangedAttributes(type(optimizer).__name__, attributes, besides)


def changed_in_model(model: Any) -> ChangedAttributes:
    """What a training has changed in the modules of a model: numbers, texts, own modes, and which weights it trains."""

    def attributes() -> dict[str, dict[str, Any]]:
        parts = {name: vars(part) for name, part in model.named_modules()}
        modes = {f"mode of {name}": _OwnMode(part, model) for name, part in model.named_modules() if name}
        return {**parts, **modes, **{name: _IsTrained(weight) for name, weight in model.named_parameters()}}

    return ChangedAttributes(type(model).__name__, attributes, ("training",), PLAIN)


class _IsTrained(dict[str, Any]):
    """The attribute of a parameter that says whether it is trained."""

    def __init__(self, parameter: Any) -> None:
        super().__init__(requires_grad=parameter.requires_grad)
        self._parameter = parameter

    def __setitem__(self, name: str, value: Any) -> None:
        self._parameter.requires_grad = value


class _OwnMode(dict[str, Any]):
    """Whether a module has another mode (`train()`, `eval()`) than the whole model, as a frozen BatchNorm has."""

    def __init__(self, part: Any, model: Any) -> None:
        super().__init__(is_other=part.training != model.training)
        self._part, self._model = part, model

    def __setitem__(self, name: str, value: Any) -> None:
        self._part.training = self._model.training != value
