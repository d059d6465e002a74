"""The parts of a trainer when it was built: what a user replaces later, or adds besides them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from typing import Any

from libai_data.data.attributes import attribute_of
from libai_data.engine.data_state import has_state
from libai_data.engine.train_loop import HookBase
from libai_data.errors import ConfigError
from libai_data.iterables.iterable_loader import IterableLoader
from libai_data.iterables.kinds import is_own_loader

logger = logging.getLogger(__name__)

_METHODS = {
    "model": "build_model",
    "optimizer": "build_optimizer",
    "lr_scheduler": "build_lr_scheduler",
    "train_loader": "build_train_loader",
    "graph_train": "build_graph",
}


class PartsAsBuilt:
    """The parts that a `DefaultTrainer` trains with, and that its checkpoints hold."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.proxy(trainer)
        self._built = {name: getattr(trainer, name) for name in _METHODS}

    def check(self) -> None:
        """Raise ConfigError if the trainer has another part now, which it would not use."""
        for name, part in self._built.items():
            if getattr(self._trainer, name) is not part:
                raise ConfigError(
                    f"trainer.{name} was replaced after the trainer was made, which would not use the new one: let "
                    f"{_METHODS[name]} return it"
                )

    def warn_of_unsaved(self, hooks: list[HookBase]) -> None:
        """Warn of models, optimizers and loaders, of the trainer and its hooks, that a resume would make anew.

        A hook with a state saves its own parts.
        """
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

        owners: list[tuple[str, Any]] = [("trainer", self._trainer)]
        owners += [(type(hook).__name__, hook) for hook in hooks if not has_state(hook)]
        found = [
            f"{owner}.{name} ({type(part).__name__})"
            for owner, thing in owners
            for name, part in _parts_of(thing)
            if is_unsaved(part)
        ]
        savers = [type(hook).__name__ for hook in hooks if has_state(hook) and not _is_own(hook)]
        if found:
            logger.log(
                logging.INFO if savers else logging.WARNING,
                "The checkpoints do not hold %s%s, so a resume makes new ones. Add modules to the trainer's model and "
                "parameters to its optimizer, or register a hook whose state_dict and load_state_dict save them.",
                ", ".join(dict.fromkeys(found)),
                f" (unless the state of {' or '.join(savers)} does)" if savers else "",
            )


def _parts_of(owner: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object, and the items of those that are lists, tuples or dicts."""
    for name, value in vars(owner).items():
        if isinstance(value, (list, tuple)):
            yield from ((f"{name}[{place}]", item) for place, item in enumerate(value))
        elif isinstance(value, dict):
            yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
        else:
            yield name, value


def _has_been_read(loader: Any) -> bool:
    # Not `loader.state_dict()`: with lanes, the ranks exchange their places there, and not all ranks may be here.
    with_state = loader if isinstance(loader, IterableLoader) else attribute_of(loader, "stream")
    return with_state is not None and with_state.state_dict()["position"] > 0


def _is_own(hook: HookBase) -> bool:
    return type(hook).__module__.startswith("libai_data.")
