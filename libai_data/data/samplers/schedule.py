"""The schedule: which positions of the stream each step uses, and which places of the order no step uses.

Two pure functions lead from a step to its samples. Both need only a few numbers, which a checkpoint stores:

    step -> positions   `StepSchedule`: step k uses the next positions after step k-1, as many as its global batch size
    position -> place   `LeftOut`: skips the places that are left out on purpose

`Order` then gives the sample at a place. If nothing is left out, a position and its place are equal.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Any

import numpy as np

from libai_data.data.cached_property import cached_property
from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import INT

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class LeftOut:
    """Places of the order that no step uses.

    Args:
        ranges: pairs [first, end); the constructor sorts them, and joins ranges that touch.

    Raises:
        ConfigError: A range ends before it begins, or begins below 0.
    """

    ranges: Ranges = ()

    def __post_init__(self) -> None:
        joined: list[list[int]] = []
        for first, end in sorted((int(first), int(end)) for first, end in self.ranges):
            if not 0 <= first <= end:
                raise ConfigError(
                    f"places {first} to {end} cannot be left out: a range must begin at 0 or later, and must not end "
                    "before it begins"
                )
            if joined and first <= joined[-1][1]:
                joined[-1][1] = max(end, joined[-1][1])
            elif first < end:
                joined.append([first, end])
        object.__setattr__(self, "ranges", tuple((first, end) for first, end in joined))

    @cached_property
    def _table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Per range: first place, end, the position after the range, and the number of places left out before it."""
        bounds = np.array(self.ranges, dtype=np.int64).reshape(-1, 2)
        before = np.concatenate([[0], np.cumsum(bounds[:, 1] - bounds[:, 0])])
        return bounds[:, 0], bounds[:, 1], bounds[:, 0] - before[:-1], before

    def places_of(self, positions: np.ndarray) -> np.ndarray:
        """The places at these positions, int64 [n]."""
        positions = np.asarray(positions, dtype=np.int64)
        if not self.ranges:
            return positions
        _, _, followers, before = self._table
        return positions + before[np.searchsorted(followers, positions, side="right")]

    def place_of(self, position: int) -> int:
        """The place at a position."""
        return int(self.places_of(np.array([position]))[0]) if self.ranges else int(position)

    def positions_of(self, places: np.ndarray) -> np.ndarray:
        """The positions of these places, int64 [n]; -1 where they are left out."""
        places = np.asarray(places, dtype=np.int64)
        if not self.ranges:
            return places
        firsts, ends, _, before = self._table
        number = np.searchsorted(firsts, places, side="right")
        inside = (number > 0) & (places < ends[np.maximum(number - 1, 0)])
        return np.where(inside, -1, places - before[number])

    def end_of(self, position: int) -> int:
        """The place after that of the last position before `position`."""
        return self.place_of(position - 1) + 1 if position else 0

    def count_before(self, place: int) -> int:
        """How many places below `place` are left out."""
        return sum(max(0, min(end, place) - first) for first, end in self.ranges)

    def since(self, place: int) -> LeftOut:
        """The places that are left out at `place` or later."""
        return LeftOut(tuple((max(first, place), end) for first, end in self.ranges if end > place))

    def joined(self, other: LeftOut) -> LeftOut:
        """The places that either of the two leaves out."""
        return LeftOut(self.ranges + other.ranges)


@dataclass(frozen=True)
class StepSchedule:
    """Step -> positions.

    Args:
        sizes: pairs (step, global batch size), steps ascending: the size is valid from this step on. The schedule
            begins with the step of the first entry.
        first_position: the position at which this first step begins.

    Raises:
        ConfigError: No entry, an entry that is no pair of ints, steps that do not ascend, or a size below 1.
    """

    sizes: Ranges
    first_position: int = 0

    def __post_init__(self) -> None:
        sizes: list[tuple[int, int]] = []
        for step, size in _pairs("the batch size schedule", self.sizes, "[first step, global batch size]"):
            if size < 1:
                raise ConfigError(f"the global batch size from step {step} on is {size}; it must be at least 1")
            if sizes and step <= sizes[-1][0]:
                raise ConfigError(f"the batch size schedule goes from step {sizes[-1][0]} to {step}; steps must ascend")
            if not sizes or size != sizes[-1][1]:
                sizes.append((step, size))
        if not sizes or sizes[0][0] < 0:
            raise ConfigError(f"the batch size schedule is {self.sizes}; it must begin with step 0 or later")
        object.__setattr__(self, "sizes", tuple(sizes))

    @cached_property
    def _steps(self) -> list[int]:
        return [step for step, _ in self.sizes]

    @cached_property
    def positions(self) -> list[int]:
        """The position at which the first step of each size begins."""
        lengths = [(end - step) * size for (step, size), end in zip(self.sizes, self._steps[1:])]
        return list(accumulate(lengths, initial=self.first_position))

    @property
    def first_step(self) -> int:
        """The first step of the schedule."""
        return self.sizes[0][0]

    def size_of(self, step: int) -> int:
        """Samples of a step, over all ranks."""
        return self.sizes[self._entry(step)][1]

    def position_of(self, step: int) -> int:
        """The position at which a step begins: the number of samples before it."""
        entry = self._entry(step)
        return self.positions[entry] + (step - self._steps[entry]) * self.sizes[entry][1]

    def steps_at(self, positions: np.ndarray) -> np.ndarray:
        """The steps that use these positions, int64 [n]; -1 for positions before the first step."""
        positions = np.asarray(positions, dtype=np.int64)
        starts = np.array(self.positions)
        entry = np.maximum(np.searchsorted(starts, positions, side="right") - 1, 0)
        sizes = np.array(self.sizes)
        steps = sizes[entry, 0] + (positions - starts[entry]) // sizes[entry, 1]
        return np.where(positions < self.first_position, -1, steps)

    def step_at(self, position: int) -> int:
        """The step that uses a position; -1 before the first step."""
        return int(self.steps_at(np.array([position]))[0])

    def continued(self, step: int, other: StepSchedule) -> StepSchedule:
        """The sizes of this schedule before `step`, and those of `other` from `step` on."""
        past = tuple(entry for entry in self.sizes if entry[0] < step)
        return StepSchedule((*past, *other.begun_at(step, 0).sizes), self.first_position)

    def begun_at(self, step: int, position: int) -> StepSchedule:
        """The schedule from `step` on, with this step at `position`."""
        future = tuple(entry for entry in self.sizes if entry[0] > step)
        return StepSchedule(((step, self.size_of(step)), *future), position)

    def is_same(self, other: StepSchedule, first: int, end: float = inf) -> bool:
        """Whether `other` has the same sizes in all steps from `first` to `end` - 1."""
        steps = [known for known in (first, *self._steps, *other._steps) if first <= known < end]
        return all(self.size_of(known) == other.size_of(known) for known in steps)

    def _entry(self, step: int) -> int:
        # Steps before the first entry have the size of the first entry.
        return max(0, bisect_right(self._steps, step) - 1)


def left_out_by(skip_steps: Iterable[tuple[int, int]], schedule: StepSchedule) -> LeftOut:
    """The places that `train.skip_steps` (first step, last step, both included) leaves out: those that these steps
    would use in a run of this schedule without any skip."""
    begin = schedule.first_step
    taken = ((max(first, begin), last + 1) for first, last in skip_steps if last >= begin)
    return LeftOut(tuple((schedule.position_of(first), schedule.position_of(end)) for first, end in taken))


def parse_sizes(key: str, value: Any) -> Ranges:
    """Read a batch size schedule from a config, such as [[0, 64], [1000, 128]]; a ConfigError if it is malformed."""
    sizes = _pairs(key, value, "[first step, global batch size]")
    steps = [step for step, _ in sizes]
    if not sizes or steps[0] != 0 or any(later <= step for step, later in zip(steps, steps[1:])):
        raise ConfigError(f"{key} is {value}; its steps must ascend, and begin with 0, as [[0, 64], [1000, 128]]")
    if any(size < 1 for _, size in sizes):
        raise ConfigError(f"{key} is {value}; every global batch size must be at least 1")
    return sizes


def parse_skips(key: str, value: Any) -> Ranges:
    """Read steps to skip from a config, such as [[1200, 1250]], both included; a ConfigError if malformed."""
    skips = _pairs(key, value, "[first step, last step]")
    for first, last in skips:
        if not 0 <= first <= last:
            raise ConfigError(f"{key} has [{first}, {last}]; give first and last step, 0 <= first <= last")
    return skips


def _pairs(key: str, value: Any, form: str) -> Ranges:
    try:
        pairs: Sequence[Any] = [tuple(pair) for pair in value or ()]
    except TypeError:
        pairs = [()]
    if any(len(pair) != 2 or not all(map(INT.accepts, pair)) for pair in pairs):
        raise ConfigError(f"{key} is {value}; it must be a list of {form}, such as [[0, 64]]")
    return tuple((int(first), int(second)) for first, second in pairs)
