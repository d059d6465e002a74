"""Losses stay on their devices until somebody looks: OneFlow computes asynchronously, and reading a value waits for
it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from libai_data.engine.events import EventStorage
from libai_data.errors import SchemaError
from libai_data.mesh import is_main_process, tensor_to_rank0

# Unread losses are at most this many steps old, however rarely the training logs.
_LONGEST_PERIOD = 100


def total_loss(outputs: Any) -> Any:
    """Sum those outputs of a model whose name contains "loss".

    Args:
        outputs: what `model.forward` returned: name -> tensor.

    Returns:
        The sum, a tensor on which `backward` can be called.

    Raises:
        SchemaError: There is none.
    """
    if not isinstance(outputs, Mapping):
        raise SchemaError(
            f"model.forward returned a {type(outputs).__name__}; in training it must return a dict of losses, such as "
            "{'loss': loss}"
        )
    losses = [value for name, value in outputs.items() if "loss" in name]
    if not losses:
        raise SchemaError(
            f"model.forward returned {sorted(outputs)}; in training, the name of at least one output must contain "
            "'loss'"
        )
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total


class LossBuffer:
    """The losses of the steps since they were last read.

    Args:
        period: read after every so many steps.
    """

    def __init__(self, period: int = 1) -> None:
        self.period = period
        self._unread: list[tuple[int, dict[str, Any]]] = []

    def is_due(self, iteration: int) -> bool:
        """Whether the losses are to be read after step `iteration`; the same answer on all ranks."""
        return (iteration + 1) % self.period == 0 or len(self._unread) >= _LONGEST_PERIOD

    def add(self, iteration: int, losses: Mapping[str, Any]) -> None:
        """Keep the losses of a step.

        Args:
            iteration: the step.
            losses: scalar tensors, global or local.
        """
        self._unread.append((iteration, {name: value.detach() for name, value in losses.items()}))

    def read_into(self, storage: EventStorage, prefix: str = "") -> None:
        """Wait for the losses and put them on rank 0, each with the step it belongs to. Collective.

        Args:
            storage: gets each loss, and their sum as "total_loss".
            prefix: put before "total_loss".
        """
        for iteration, losses in self._unread:
            values = {name: _read(losses[name]) for name in losses}
            if not is_main_process():
                continue
            storage.put_scalar(
                prefix + "total_loss",
                sum(value for name, value in values.items() if "loss" in name),
                iteration=iteration,
            )
            if len(values) > 1:
                for name, value in values.items():
                    storage.put_scalar(name, value, iteration=iteration)
        self._unread.clear()


def _read(value: Any) -> float:
    local = tensor_to_rank0(value, device="cpu", to_local=True)
    return float(local.numpy().sum()) if is_main_process() else 0.0
