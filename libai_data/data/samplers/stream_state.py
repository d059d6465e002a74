"""The state of a stream: the few numbers that decide all its samples, and their JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from libai_data.data.datasets.fingerprint import hash_of
from libai_data.data.datasets.stream_transform import Start, place_and_offset, start_of, starts_of
from libai_data.data.samplers.blend_order import order_from_json
from libai_data.data.samplers.order import Order
from libai_data.data.samplers.schedule import LeftOut, StepSchedule
from libai_data.errors import CheckpointError, ConfigError
from libai_data.errors.argument_rules import FLAG, INT, MAPPING, TEXT, Rule, each, or_none, whole
from libai_data.errors.saved_state import Keys, check_state

NOTHING = LeftOut()

_NUMBER = whole(0)
PAIR = each(_NUMBER, 2)
_COUNTS = each(_NUMBER)
_PHASE = Rule(
    "a list of a place and of samples of each dataset",
    lambda value: (
        isinstance(value, (list, tuple)) and len(value) == 2 and _NUMBER.accepts(value[0]) and _COUNTS.accepts(value[1])
    ),
)


START = Rule(
    "a place and what is used of its sample, in lanes those of each lane, or None",
    lambda value: value is None or PAIR.accepts(value) or (bool(value) and each(PAIR).accepts(value)),
)


ORDER = Keys(
    {"seed": INT, "shuffle": FLAG, "samples": whole(1), "epoch_size": whole(1), "order_version": INT},
    {
        "blend": Keys(
            {"sizes": _COUNTS, "phases": each(_PHASE)}, {"limits": each(or_none(_NUMBER)), "limited_from": _NUMBER}
        ),
        "weights": Keys({"digest": TEXT, "replacement": FLAG}),
        "lanes": Keys({"lanes": whole(1), "block": whole(1), "digest": TEXT}),
    },
)
"""What decides the order of the samples."""
ORDER_KEYS = tuple(ORDER.required)
_KEYS = Keys(
    {"position": _NUMBER, **ORDER.required},
    {
        "left_out": each(PAIR),
        "batch_sizes": each(PAIR),
        "first_position": whole(-(1 << 62)),
        "start": START,
        **ORDER.optional,
        "dataset": or_none(MAPPING),
    },
)


@dataclass(frozen=True)
class StreamState:
    """The position in a stream, and all that decides the samples that follow.

    Args:
        position: samples that all ranks together have used; the position of the next sample.
        order: place -> (epoch, index).
        left_out: places that no step uses.
        schedule: the sizes of the steps; None if the loader is used without steps.
        start: for a stream transform, where the output at `position` begins, or -1 if not known yet; None for any other
            stream. In lanes, where the next output of each lane begins, or -1.
    """

    position: int
    order: Order
    left_out: LeftOut = NOTHING
    schedule: StepSchedule | None = None
    start: Start | None = None

    @property
    def place(self) -> int:
        """The place after the last sample that was used, completely or in part."""
        if self.start is not None:
            found = (place_and_offset(start) for start in starts_of(self.start) if start >= 0)
            return max((place + (offset > 0) for place, offset in found), default=0)
        return self.left_out.end_of(self.position)

    @property
    def is_whole(self) -> bool:
        """Whether the start is known, of all lanes."""
        return self.start is None or min(starts_of(self.start)) >= 0

    @property
    def step(self) -> int | None:
        """The step that uses the next sample; None without a schedule."""
        return None if self.schedule is None else self.schedule.step_at(self.position)

    def to_json(self) -> dict[str, Any]:
        """The state as JSON: numbers, lists, and mappings for a blend, weights and lanes."""
        state: dict[str, Any] = {"position": self.position, **self.order.to_json()}
        if self.left_out.ranges:
            state["left_out"] = [list(places) for places in self.left_out.ranges]
        if self.schedule is not None:
            state["batch_sizes"] = [list(entry) for entry in self.schedule.sizes]
            state["first_position"] = self.schedule.first_position
        if self.start is not None:
            pairs = [list(place_and_offset(start)) for start in starts_of(self.start)]
            state["start"] = None if not self.is_whole else pairs if isinstance(self.start, tuple) else pairs[0]
        return state

    @staticmethod
    def from_json(state: Mapping[str, Any]) -> StreamState:
        """Read a state from the result of `to_json`; a CheckpointError if a key is missing or unknown, or a value
        wrong."""
        check_state(state, _KEYS, "a sampler")
        try:
            order = order_from_json(state)
            left_out = LeftOut(tuple((first, end) for first, end in state.get("left_out", ())))
            schedule = None
            if "batch_sizes" in state:
                sizes = tuple((step, size) for step, size in state["batch_sizes"])
                schedule = StepSchedule(sizes, state.get("first_position", 0))
            start = None
            if "start" in state:
                start = start_from_json(state["start"], order.lanes)
        except ConfigError as error:
            raise CheckpointError(f"the data state {dict(state)} is broken: {error}") from error
        return StreamState(int(state["position"]), order, left_out, schedule, start)


def start_from_json(start: Any, lanes: int) -> Start:
    """Read a start that `to_json` wrote as pairs of place and offset, or None (-1). Other lanes are a ConfigError."""
    if start is None:
        return -1
    if lanes == 1 and PAIR.accepts(start):
        return int(start_of(*start))
    pairs = [] if PAIR.accepts(start) else start
    if lanes == 1 or [place % lanes for place, _ in pairs] != list(range(lanes)):
        raise ConfigError(f"start does not fit a stream of {lanes} lane{'s' * (lanes > 1)}")
    return tuple(int(start_of(*pair)) for pair in pairs)


def order_in_words(stream: Any) -> str:
    """What decides the samples of a stream, in words: its `order_words()`, or its state without the position. Equal
    streams have equal words."""
    words = stream.order_words() if hasattr(stream, "order_words") else stream.state_dict()
    found = [f"{key} {value}" for key, value in sorted(words.items()) if key not in ("position", "start")]
    start = getattr(stream, "restored_start", None)
    # All ranks know the starts of all lanes only in the restored state.
    found += [] if start is None else [f"starts in the restored state {hash_of(repr(start).encode())}"]
    return ", ".join(found)
