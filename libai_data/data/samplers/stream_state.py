"""The state of a stream: the few numbers from which all its samples follow, and their JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from libai_data.data.datasets.stream_transform import place_and_offset, start_of
from libai_data.errors import CheckpointError, ConfigError
from libai_data.data.samplers.blend_order import order_from_json
from libai_data.data.samplers.order import Order
from libai_data.data.samplers.schedule import LeftOut, StepSchedule

ORDER_KEYS = ("seed", "shuffle", "samples", "epoch_size", "order_version")
"""What decides the order of the samples."""


NOTHING = LeftOut()


@dataclass(frozen=True)
class StreamState:
    """A place in a stream.

    Args:
        position: samples that all ranks have taken; the position of the next one.
        order: place -> (epoch, index).
        left_out: places that no step takes.
        schedule: the sizes of the steps; None if whoever iterates knows of no steps.
        start: of a stream transform, where the output at `position` begins (`start_of`), or -1 if that is yet to be
            found; None for any other stream.
    """

    position: int
    order: Order
    left_out: LeftOut = NOTHING
    schedule: StepSchedule | None = None
    start: int | None = None

    @property
    def place(self) -> int:
        """The place behind the last sample that was taken, whole or in part."""
        if self.start is not None:
            place, offset = place_and_offset(max(self.start, 0))
            return place + (offset > 0)
        return self.left_out.end_of(self.position)

    @property
    def step(self) -> int | None:
        """The step that takes the next sample; None without a schedule."""
        return None if self.schedule is None else self.schedule.step_at(self.position)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, and lists of them where something is left out or the steps have sizes."""
        state: dict[str, Any] = {
            "position": self.position,
            **self.order.to_json(),
        }
        if self.left_out.ranges:
            state["left_out"] = [list(places) for places in self.left_out.ranges]
        if self.schedule is not None:
            state["batch_sizes"] = [list(entry) for entry in self.schedule.sizes]
            state["first_position"] = self.schedule.first_position
        if self.start is not None:
            state["start"] = None if self.start < 0 else list(place_and_offset(self.start))
        return state

    @staticmethod
    def from_json(state: Mapping[str, Any]) -> StreamState:
        """Read what `to_json` made.

        Raises:
            CheckpointError: Something is missing or impossible.
        """
        missing = sorted({"position", *ORDER_KEYS} - set(state))
        if missing:
            raise CheckpointError(f"the data state lacks {missing}; it was not saved by this sampler: {dict(state)}")
        check_position(state["position"])
        try:
            order = order_from_json(state)
            left_out = LeftOut(tuple((first, end) for first, end in state.get("left_out", ())))
            schedule = None
            if "batch_sizes" in state:
                sizes = tuple((step, size) for step, size in state["batch_sizes"])
                schedule = StepSchedule(sizes, state.get("first_position", 0))
            start = None
            if "start" in state:
                start = -1 if state["start"] is None else start_of(*(int(number) for number in state["start"]))
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the data state {dict(state)} is broken: {error}") from error
        return StreamState(state["position"], order, left_out, schedule, start)


def check_position(position: Any, name: str = "position", least: int = 0) -> None:
    """Refuse a saved position, or another number of a state, that cannot be one.

    Raises:
        CheckpointError: It is no int, or below `least`.
    """
    if not isinstance(position, int) or isinstance(position, bool) or position < least:
        raise CheckpointError(f"the data state's {name} is {position!r}; it must be an int of at least {least}")
