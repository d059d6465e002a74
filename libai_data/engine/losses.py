"""Losses stay on their devices until they are read: OneFlow computes asynchronously, and reading a value waits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Callable

import numpy as np

from libai_data.data.samplers.ledger import Ledger
from libai_data.delivery.gather import gather_words
from libai_data.engine.data_state import stream_state_of
from libai_data.engine.events import EventStorage
from libai_data.errors import NonFiniteLossError, SchemaError
from libai_data.mesh.arrays import is_flow_tensor
from libai_data.mesh.current import broadcast_py_object, is_main_process, tensor_to_rank0

# Unread losses are at most this many steps old, however rarely the training logs.
_LONGEST_PERIOD = 100
_MOST_SAMPLES = 256


def mean_of(output: Any) -> Any:
    """The mean of an output of a model; in OneFlow, integers and booleans have none of their own."""
    return (output * 1.0).mean()


def total_loss(outputs: Any) -> Any:
    """Sum the outputs of a model whose names contain "loss", without those that are None.

    Raises SchemaError if there is none, one has several numbers, or an output is neither a tensor nor None.
    """
    if not isinstance(outputs, Mapping):
        raise SchemaError(
            f"model.forward returned a {type(outputs).__name__}; in training it must return a dict of losses, such as "
            "{'loss': loss}"
        )
    losses = [value for name, value in outputs.items() if "loss" in name and value is not None]
    if not losses:
        raise SchemaError(
            f"model.forward returned {sorted(outputs)}; in training, the name of at least one output must contain "
            "'loss'"
        )
    for name, value in outputs.items():
        if value is not None and not is_flow_tensor(value):
            raise SchemaError(
                f"model.forward returned '{name}', a {type(value).__name__}; in training, each output must be a tensor "
                "of OneFlow, or None"
            )
        if "loss" in name and math.prod(getattr(value, "shape", ())) != 1:
            raise SchemaError(
                f"model.forward returned '{name}' of shape {list(value.shape)}; in training, an output whose name "
                "contains 'loss' must be a single number, such as its mean()"
            )
    return sum(losses[1:], losses[0])


class LossBuffer:
    """The losses of the steps since they were last read. Of local ones, the mean over all ranks is logged."""

    def __init__(self, period: int = 1) -> None:
        self.period = period  # number of steps after which the losses are read
        self.stop_on_nonfinite = True  # raise an error when a loss that is read is NaN or infinite
        self.samples_of: Callable[[int], str] = lambda step: ""  # describes the samples of a step, for the error
        self._unread: list[tuple[int, dict[str, Any]]] = []

    def is_due(self, iteration: int) -> bool:
        """Whether the losses are to be read after step `iteration`; the same answer on all ranks."""
        return len(self._unread) >= _LONGEST_PERIOD or (iteration + 1) % self.period == 0

    def add(self, iteration: int, losses: Mapping[str, Any]) -> None:
        """Keep the losses of a step, scalar tensors, global or local."""
        self._unread.append((iteration, {name: value.detach() for name, value in losses.items()}))

    def forget_from(self, iteration: int) -> None:
        """Drop the losses of steps from `iteration` on, which a training repeats."""
        self._unread = [(step, losses) for step, losses in self._unread if step < iteration]

    def read_into(self, storage: EventStorage, prefix: str = "") -> None:
        """Wait for the losses; rank 0 puts each step's losses, and their sum "total_loss", into `storage`. Collective.

        Raises NonFiniteLossError if a loss is NaN or infinite, and `stop_on_nonfinite` is True.
        """
        if not self._unread:
            return
        local_means = iter(_means_over_ranks([value for _, losses in self._unread for value in losses.values()]))
        problem, bad = "", -1  # this rank's first step with a loss that is not finite
        for iteration, losses in self._unread:
            if bad < 0 and not all(_is_finite_here(value) for name, value in losses.items() if "loss" in name):
                bad = iteration
            values = {name: number_on_rank0(losses[name]) for name in losses}
            if not is_main_process():
                continue
            means = {name: values[name] if losses[name].is_global else next(local_means) for name in losses}
            total = sum(value for name, value in means.items() if "loss" in name)
            storage.put_scalar(prefix + "total_loss", total, iteration=iteration)
            if len(values) > 1:
                for name, value in means.items():
                    storage.put_scalar(name, value, iteration=iteration)
            summed = {name: value for name, value in values.items() if "loss" in name}
            if self.stop_on_nonfinite and not problem and not math.isfinite(sum(summed.values())):
                shown = ", ".join(f"{name} = {value}" for name, value in summed.items())
                problem, bad = self._problem(iteration, shown), iteration
        self._unread.clear()
        if not self.stop_on_nonfinite:
            return
        steps = gather_words(np.array([bad])).ravel()
        if steps.max() >= 0:
            rank = int(np.argmax(steps >= 0))
            raise NonFiniteLossError(
                broadcast_py_object(problem or self._problem(int(steps[rank]), f"that of rank {rank} alone"))
            )

    def _problem(self, iteration: int, shown: str) -> str:
        return (
            f"step {iteration} has a loss that is NaN or infinite: {shown}.{self.samples_of(iteration)} To train on in "
            "spite of such losses, set train.stop_on_nonfinite_loss=False."
        )


def samples_in_words(loader: Any, step: int) -> str:
    """A description of a step's samples, and how to leave them out; "" if the loader is not of this package."""
    state = stream_state_of(loader)
    if state is None or state.schedule is None:
        return ""
    if state.start is not None:
        first, end = state.schedule.position_of(step), state.schedule.position_of(step + 1)
        return f" The step took the positions {first} to {end - 1} of the stream."
    epochs, indices = Ledger(state).samples_of(step)
    shown = [f"{epoch}:{index}" for epoch, index in zip(epochs.tolist(), indices.tolist())]
    more = f" and {len(shown) - _MOST_SAMPLES} more" if len(shown) > _MOST_SAMPLES else ""
    skip = "" if state.left_out.ranges else f"=[[{step}, {step}]]"
    return (
        f" The step's samples, as epoch:index, are {', '.join(shown[:_MOST_SAMPLES])}{more}. To leave them out, resume "
        f"from an earlier checkpoint with train.skip_steps{skip}."
    )


def _means_over_ranks(values: list[Any]) -> np.ndarray:
    """The mean over all ranks of each local tensor; global tensors are left out. Collective."""
    own = np.array([value.numpy().mean() for value in values if not value.is_global], dtype=np.float64)
    return gather_words(own.view(np.int64)).view(np.float64).mean(axis=0) if own.size else own


def _is_finite_here(value: Any) -> bool:
    """Whether this rank's copy of a loss, which only rank 0 logs, is finite; True for a loss without copies."""
    import oneflow as flow

    if value.is_global and (any(sbp != flow.sbp.broadcast for sbp in value.sbp)):
        return True
    return bool(np.isfinite((value.to_local() if value.is_global else value).numpy()).all())


def number_on_rank0(value: Any) -> float:
    """The number in a scalar tensor, global or local, or the mean of several; 0 on other ranks. Collective."""
    local = tensor_to_rank0(value, device="cpu", to_local=True)
    return float(local.numpy().mean()) if is_main_process() else 0.0
