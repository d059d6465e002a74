"""What changes in a training, and its checkpoints do not hold: further models, optimizers and loaders of a user."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from libai_data.data.attributes import attribute_of
from libai_data.engine.data_state import has_state
from libai_data.engine.train_loop import HookBase

logger = logging.getLogger(__name__)


def warn_of_unsaved_parts(trainer: Any, hooks: list[HookBase]) -> None:
    """Warn of parts of a `DefaultTrainer` and its hooks that a resume would silently make anew.

    A hook with a state saves its own parts.
    """
    import oneflow as flow

    checkpointer = trainer.checkpointer
    weights = {id(weight) for weight in checkpointer.model.parameters()}
    others = (checkpointer.optimizer, trainer.lr_scheduler, trainer.train_loader, *trainer.test_loader)
    known = set(map(id, others))

    def is_unsaved(part: Any) -> bool:
        if isinstance(part, flow.nn.Module):
            return any(weight.requires_grad and id(weight) not in weights for weight in part.parameters())
        if isinstance(part, (flow.optim.Optimizer, flow.optim.lr_scheduler._LRScheduler)):
            return id(part) not in known
        # Of the loaders, those of this package from which the training has read. The errors that a config raises for
        # unknown attributes would keep the trainer alive.
        is_loader = hasattr(type(part), "load_state_dict") and attribute_of(part, "stream") is not None
        return is_loader and id(part) not in known and bool(part.state_dict().get("position"))

    owners: list[tuple[str, Any]] = [("trainer", trainer)]
    owners += [(type(hook).__name__, hook) for hook in hooks if not has_state(hook)]
    found = [
        f"{owner}.{name} ({type(part).__name__})"
        for owner, thing in owners
        for name, part in _parts_of(thing)
        if is_unsaved(part)
    ]
    if found:
        logger.warning(
            "The checkpoints do not hold %s, so a resume makes new ones. Add modules to the trainer's model and "
            "parameters to its optimizer, or register a hook whose state_dict and load_state_dict save them.",
            ", ".join(dict.fromkeys(found)),
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
