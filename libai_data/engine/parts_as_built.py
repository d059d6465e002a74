"""The parts of a trainer when it was built: what a user replaces later, or adds besides them."""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from inspect import isfunction
from typing import Any

import numpy as np

from libai_data.data.attributes import attribute_of
from libai_data.engine.checkpoint.changed_attributes import PLAIN
from libai_data.engine.data_state import has_state
from libai_data.engine.train_loop import HookBase
from libai_data.errors import ConfigError
from libai_data.iterables.iterable_loader import IterableLoader
from libai_data.iterables.kinds import is_own_loader
from libai_data.mesh.arrays import is_flow_tensor

logger = logging.getLogger(__name__)

_METHODS = {
    "model": "build_model",
    "optimizer": "build_optimizer",
    "lr_scheduler": "build_lr_scheduler",
    "train_loader": "build_train_loader",
    "graph_train": "build_graph",
}
_OF_TRAINERS = {f"trainer.{name}" for name in ("iter", "start_iter", "max_iter", "ended_at")}


class PartsAsBuilt:
    """The parts that a `DefaultTrainer` trains with, and that its checkpoints hold."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.proxy(trainer)
        self._built = {name: getattr(trainer, name) for name in _METHODS}
        self._contents: dict[str, str] | None = None
        self._named = set(_OF_TRAINERS)

    def check(self) -> None:
        """Raise ConfigError if the trainer has another part now, which it would not use."""
        for name, part in self._built.items():
            if getattr(self._trainer, name) is not part:
                raise ConfigError(
                    f"trainer.{name} was replaced after the trainer was made, which would not use the new one: let "
                    f"{_METHODS[name]} return it"
                )

    def warn_of_unsaved(self, hooks: list[HookBase]) -> None:
        """Warn once of all that a resume would make anew, of the trainer, the model, and hooks without a state.

        After the first step, these are models, optimizers and loaders; later, attributes whose content has changed
        since the last call of this method. The checkpoints hold the numbers and texts of the model's modules.
        """
        if self._contents is None:
            self._warn_of_unsaved_parts(hooks)
        self._warn_of_changed(hooks)

    def _warn_of_unsaved_parts(self, hooks: list[HookBase]) -> None:
        import oneflow as flow

        weights = {id(weight) for weight in self._built["model"].parameters()}
        known = set(map(id, (*self._built.values(), *self._trainer.test_loader)))

        def is_unsaved(part: Any) -> bool:
            if isinstance(part, flow.nn.Module):
                return any(weight.requires_grad and id(weight) not in weights for weight in part.parameters())
            if isinstance(part, (flow.optim.Optimizer, flow.optim.lr_scheduler._LRScheduler)):
                return id(part) not in known
            # A loader from which the training has not read, such as that of an evaluation, begins anew anyway.
            return is_own_loader(part) and id(part) not in known and _has_been_read(part)

        found = [
            f"{owner}.{name} ({type(part).__name__})"
            for owner, thing in self._owners(hooks)
            for name, part in _parts_of(thing)
            if is_unsaved(part)
        ]
        savers = [type(hook).__name__ for hook in hooks if has_state(hook) and not _is_of_package(type(hook))]
        if found:
            logger.log(
                logging.INFO if savers else logging.WARNING,
                "The checkpoints do not hold %s%s, so a resume makes new ones. Add modules to the trainer's model and "
                "parameters to its optimizer, or register a hook whose state_dict and load_state_dict save them.",
                ", ".join(dict.fromkeys(found)),
                f" (unless the state of {' or '.join(savers)} does)" if savers else "",
            )

    def _warn_of_changed(self, hooks: list[HookBase]) -> None:
        parts = self._built["model"].named_modules()
        contents = {
            f"{owner}.{name}": _digest(value)
            for owner, thing in (*self._owners(hooks), *((f"model.{name}".rstrip("."), part) for name, part in parts))
            for known in [_names_of_package(thing.__class__)]
            for name, value in list(vars(thing).items())
            if not (name.startswith("_") or name in known or f"{owner}.{name}" in self._named)
            if not (owner.startswith("model") and isinstance(value, PLAIN))
        }
        before = self._contents or {}
        new = [name for name in contents if before.get(name, contents[name]) != contents[name]]
        self._contents = contents
        self._named.update(new)
        if new:
            logger.warning(
                "The training changes %s, which the checkpoints do not hold, so a resume begins with other values. "
                "Give hooks a state_dict and load_state_dict, and register tensors of the model as buffers. Values "
                "that each step makes anew need neither.",
                ", ".join(new),
            )

    def _owners(self, hooks: list[HookBase]) -> list[tuple[str, Any]]:
        """What may have attributes of a user's code that no checkpoint holds, each with its name."""
        return [("trainer", self._trainer), *((type(hook).__name__, hook) for hook in hooks if not has_state(hook))]


def _parts_of(owner: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object, and the items of those that are lists, tuples or dicts."""
    for name, value in vars(owner).items():
        if isinstance(value, (list, tuple)):
            yield from ((f"{name}[{place}]", item) for place, item in enumerate(value))
        elif isinstance(value, dict):
            yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
        else:
            yield name, value


def _digest(value: Any) -> str:
    """A digest of numbers, texts, arrays and tensors, and of lists and dicts of these; other objects are equal."""
    digest = hashlib.blake2b()

    def add(part: Any) -> None:
        digest.update(f"{type(part).__name__} ".encode())
        if isinstance(part, dict):
            add(list(part.items()))
        elif isinstance(part, (list, tuple, set, frozenset, deque)):
            for each in part:
                add(each)
        elif is_flow_tensor(part):
            with suppress(TypeError, RuntimeError):  # numpy has no bfloat16.
                add((part.to_local() if part.is_global else part).detach().numpy())
        elif isinstance(part, np.ndarray):
            digest.update(part.tobytes())
        elif isinstance(part, (*PLAIN, bytes)):
            digest.update(repr(part).encode(errors="surrogatepass"))

    with suppress(RuntimeError):  # It contains itself, or another thread changes it.
        add(value)
    return digest.hexdigest()


def _has_been_read(loader: Any) -> bool:
    # Not `loader.state_dict()`: with lanes, the ranks exchange their places there, and not all ranks may be here.
    with_state = loader if isinstance(loader, IterableLoader) else attribute_of(loader, "stream")
    return with_state is not None and with_state.state_dict()["position"] > 0


def _is_of_package(kind: type) -> bool:
    return kind.__module__.startswith("libai_data.")


@cache
def _names_of_package(kind: type) -> frozenset[str]:
    """The names that the methods of this package's hooks use: these hooks restore their attributes themselves."""
    bases = [base for base in kind.__mro__ if _is_of_package(base)] if issubclass(kind, HookBase) else []
    methods = [each for base in bases for each in vars(base).values() if isfunction(each)]
    return frozenset(name for method in methods for name in method.__code__.co_names)
