"""The train loader's place in its stream, as the trainer keeps and shows it."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from libai_data.errors import CheckpointError, ConfigError
from libai_data.samplers.schedule import StepSchedule
from libai_data.samplers.stream_state import StreamState

OVERRIDE_KEY = "train.resume_override"
_TOKEN_FIELDS = ("input_ids", "tokens", "token_ids", "encoder_input_ids")


class DataState:
    """What a checkpoint keeps of a train loader.

    Args:
        loader: any with `state_dict` and `load_state_dict`.
        override: what may differ from the checkpoint on purpose (`train.resume_override`).
    """

    def __init__(self, loader: Any, override: Collection[str] = ()) -> None:
        self._loader = loader
        self._override = tuple(override)
        self._restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The loader's state."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the loader; not again, if it stands there already.

        Raises:
            CheckpointError: The state belongs to another dataset or stream.
            ConfigError: The loader knows of nothing that could be overridden.
        """
        if state == self._restored:
            return
        if not self._override:
            self._loader.load_state_dict(state)
        elif "override" in inspect.signature(self._loader.load_state_dict).parameters:
            self._loader.load_state_dict(state, override=self._override)
        else:
            raise ConfigError(
                f"{OVERRIDE_KEY} is {list(self._override)}, but a {type(self._loader).__name__} cannot be told of it"
            )
        self._restored = dict(state)

    def check_step(self, step: int) -> None:
        """Refuse a loader that does not stand where `step` begins.

        Raises:
            CheckpointError: With both steps.
        """
        stream = stream_state_of(self._loader)
        if stream is not None and stream.schedule is not None and stream.schedule.position_of(step) != stream.position:
            raise CheckpointError(
                f"the checkpoint continues with step {step}, which begins at position "
                f"{stream.schedule.position_of(step)}, but its data state stands at position {stream.position}; "
                "'libai-data state edit CHECKPOINT --position N' sets it"
            )


def stream_state_of(loader: Any) -> StreamState | None:
    """Where a loader of this package stands in its endless stream; None for any other."""
    state = getattr(getattr(loader, "stream", None), "state", None)
    return state if isinstance(state, StreamState) else None


def schedule_of(loader: Any, global_batch_size: int) -> StepSchedule:
    """The schedule that a loader follows; steps of equal size where it follows none."""
    state = stream_state_of(loader)
    if state is not None and state.schedule is not None:
        return state.schedule
    return StepSchedule(((0, global_batch_size),))


def tokens_per_sample(loader: Any, inputs: Mapping[str, Any]) -> int:
    """Tokens of one sample, where all have equally many; 0 where it is not known.

    The dataset's attribute `tokens_per_sample`, or else the length of the model's input that is called like tokens.
    With a collator, lengths may change from batch to batch and from mesh to mesh.

    Args:
        loader: the train loader.
        inputs: name -> global tensor of the model's first inputs.
    """
    declared = getattr(getattr(loader, "dataset", None), "tokens_per_sample", None)
    if isinstance(declared, int):
        return declared
    if getattr(loader, "collates", True):
        return 0
    shapes = [tuple(inputs[name].shape) for name in _TOKEN_FIELDS if name in inputs]
    return next((int(shape[1]) for shape in shapes if len(shape) == 2), 0)
