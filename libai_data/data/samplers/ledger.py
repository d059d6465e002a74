"""The ledger: which samples made up a step, and which steps used a sample, computed without a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from libai_data.data.samplers.schedule import StepSchedule
from libai_data.data.samplers.stream_state import StreamState
from libai_data.errors import CheckpointError


@dataclass(frozen=True)
class Use:
    """One use of a sample: in which step, as which of its rows, and in which epoch."""

    step: int
    row: int
    epoch: int


class Ledger:
    """Answers from a state alone, for past and future steps.

    Args:
        state: of a stream whose steps have sizes, such as that of a checkpoint.
        batches: global batch size -> batches that a step of this size is cut into, if not 1. Only the rows of a stream
            in lanes depend on this: the rows of each batch are sorted.

    Raises:
        CheckpointError: The state knows of no steps.
    """

    def __init__(self, state: StreamState, batches: Mapping[int, int] | None = None) -> None:
        if state.schedule is None:
            raise CheckpointError(
                "the data state knows the place in the stream, but no steps: it was saved by a loader without a "
                "trainer; let the sampler follow(StepSchedule(((0, global batch size),)))"
            )
        if state.start is not None:
            raise CheckpointError(
                "the samples that made up a step of a stream transform, such as a packer, depend on the samples' "
                "lengths; the data state alone does not determine them"
            )
        self.state = state
        self.schedule: StepSchedule = state.schedule
        self._batches = batches or {}

    def samples_of(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The samples that make up a step.

        Args:
            step: index of the step.

        Returns:
            epochs and indices, int64 [global batch size] each, in the order of rows.

        Raises:
            CheckpointError: The step lies before those that the state knows of.
        """
        self._check(step)
        return self.state.order.locate(self._places_of(step))

    def _places_of(self, step: int) -> np.ndarray:
        """The places of a step, int64 [global batch size], in the order of rows."""
        size = self.schedule.size_of(step)
        places = self.state.left_out.places_of(self.schedule.position_of(step) + np.arange(size))
        return self.state.order.in_rows(places.reshape(self._batches.get(size, 1), -1)).ravel()

    def uses_of(self, index: int, until_step: int) -> list[Use]:
        """The steps before `until_step` that use a sample.

        Args:
            index: of the sample in the dataset.
            until_step: index behind that of the last step to look at.

        Returns:
            The uses, in order. An epoch in which the sample is left out has none.

        Raises:
            CheckpointError: `until_step` lies before the steps that the state knows of.
            IndexError: The dataset has no such sample.
        """
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

    def _check(self, step: int) -> None:
        if step < self.schedule.first_step:
            raise CheckpointError(
                f"the ledger begins with step {self.schedule.first_step}, where the order of the samples was changed "
                f"on purpose; use a checkpoint from before that change for step {step}"
            )
