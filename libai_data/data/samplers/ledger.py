"""The ledger: computes the samples of a step, and the steps that used a sample, without a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from libai_data.data.samplers.schedule import StepSchedule
from libai_data.data.samplers.stream_state import StreamState
from libai_data.errors import CheckpointError
from libai_data.errors.argument_rules import check, whole

MOST_STEPS = 1 << 40
"""Above any training, and small enough that positions are 64-bit numbers."""


@dataclass(frozen=True)
class Use:
    """One use of a sample: the step, the row in the step, and the epoch."""

    step: int
    row: int
    epoch: int


class Ledger:
    """Computes the samples of past and future steps from a state alone.

    Args:
        state: the state of a stream with a schedule of steps, such as the state in a checkpoint.
        batches: global batch size -> number of batches that a step of this size is cut into; 1 if absent. This matters
            only for a stream in lanes, because the rows of each batch are sorted by lane.

    Raises:
        CheckpointError: The state has no steps; or, if samples are asked for, it is that of a stream transform.
    """

    def __init__(self, state: StreamState, batches: Mapping[int, int] | None = None) -> None:
        if state.schedule is None:
            raise CheckpointError(
                "the data state has the place in the stream, but no steps: its loader ends after each epoch, or was "
                "used without a trainer, where sampler.follow(StepSchedule(((0, global batch size),))) gives it steps"
            )
        self.state = state
        self.schedule: StepSchedule = state.schedule
        self._batches = batches or {}

    def positions_of(self, step: int) -> range:
        """The positions of a step; a CheckpointError if it is before the first step of the state's schedule."""
        self._check(step)
        first = self.schedule.position_of(step)
        return range(first, first + self.schedule.size_of(step))

    def samples_of(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Epochs and indices of the samples of a step, int64 [global batch size] each, in the order of rows. A
        CheckpointError if the step is before the first step of the state's schedule."""
        return self.state.order.locate(self._places_of(step))

    def _places_of(self, step: int) -> np.ndarray:
        """The places of a step, int64 [global batch size], in the order of rows."""
        self._refuse_transform()
        positions = np.array(self.positions_of(step))
        places = self.state.left_out.places_of(positions)
        return self.state.order.in_rows(places.reshape(self._batches.get(len(positions), 1), -1)).ravel()

    def uses_of(self, index: int, until_step: int) -> list[Use]:
        """The steps before `until_step` that use a sample, in order, except in epochs that leave the sample out. A
        CheckpointError as of `samples_of`; an IndexError if the dataset has no such sample."""
        self._refuse_transform()
        self._check(until_step)
        state, schedule = self.state, self.schedule
        end = state.left_out.end_of(schedule.position_of(until_step))
        first = state.left_out.end_of(schedule.first_position)
        epochs, places = state.order.uses_of(index, first, end)
        positions = state.left_out.positions_of(places)
        taken = (positions >= schedule.first_position) & (positions < schedule.position_of(until_step))
        uses = []
        for step, place, epoch in zip(
            schedule.steps_at(positions[taken]).tolist(), places[taken].tolist(), epochs[taken].tolist()
        ):
            uses.append(Use(step, int(np.flatnonzero(self._places_of(step) == place)[0]), epoch))
        return uses

    def _refuse_transform(self) -> None:
        if self.state.start is not None:
            raise CheckpointError(
                "the samples that made up a step of a stream transform, such as a packer, depend on the samples' "
                "lengths, which the data state does not have; libai-data inspect --step shows the outputs of a step"
            )

    def _check(self, step: int) -> None:
        check({"step": whole(0, MOST_STEPS)}, step=step)
        if step < self.schedule.first_step:
            raise CheckpointError(
                f"the ledger begins with step {self.schedule.first_step}, where the order of the samples was changed "
                f"on purpose; use a checkpoint from before that change for step {step}"
            )
