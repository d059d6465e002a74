"""The walk: finds where each output of a stream transform begins, by going through the samples in order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from libai_data.data.datasets.stream_transform import Start, place_and_offset, remember, start_of
from libai_data.data.samplers.order import Order
from libai_data.errors import ConfigError, by_rank

_KNOWN_AT_ONCE = 4096
_MEASURED_AT_ONCE = 8
_LEAST_AT_ONCE = 64
_REMEMBERED = 2048
_LEAST_REMEMBERED = 320
"""Least number of batches whose starts a walk remembers: more than a loader can prefetch."""

UNKNOWN = -1
"""A start that is not known yet and must be found by a walk; in lanes, also the start of a lane of other readers."""


class Walk:
    """Goes through a stream transform's samples, in the order of the stream.

    The walk remembers the last starts that it found. A known start costs nothing. For any other position, the walk
    begins at the last known start before it, or at the beginning of the stream.

    Args:
        transform: the stream transform; None on a rank that does not read, which gets the starts from other ranks.
        order: the order of the samples.
        in_rounds: whether no output has samples of two epochs.

    With lanes, a `Walk` covers one lane: it goes through every `lanes`-th place.
    """

    def __init__(self, transform: Any | None, order: Order, in_rounds: bool = False) -> None:
        self._transform = transform
        self._order = order
        self._starts: OrderedDict[int, Start] = OrderedDict()
        self._apart = order.lanes
        self._known_at_once = max(_KNOWN_AT_ONCE // order.lanes, _LEAST_AT_ONCE)
        self._remembered = max(_REMEMBERED // order.lanes, _LEAST_REMEMBERED)
        self._buffer_place = 0
        self._buffer = np.empty(0, dtype=np.int64)
        if transform is not None:
            transform.follow_order(order, in_rounds)

    def note(self, position: int, start: Start) -> None:
        """Remember where the output at a position begins."""
        if start != UNKNOWN:
            remember(self._starts, position, start, self._remembered)

    def known_start(self, position: int) -> Start:
        """Where the output at a position begins, or `UNKNOWN`."""
        return self._first_start if position == 0 else self._starts.get(position, UNKNOWN)

    @property
    def _first_start(self) -> Start:
        return 0

    def outputs(self, position: int, count: int, turns: Sequence[int] | None = None) -> tuple[np.ndarray, Start]:
        """Find `count` outputs, beginning at a position.

        Args:
            turns: of lanes, those whose outputs are found; all others' are `UNKNOWN`.

        Returns:
            The start of each output, int64 [count]; and the start of the output after them.

        Raises:
            ConfigError: About as many consecutive samples as an epoch has yield no output.
        """
        start = self.known_start(position)
        if start == UNKNOWN:
            before = max((known for known in self._starts if known < position), default=0)
            _, start = self._walk_from(self.known_start(before), position - before)
            self.note(position, start)
        firsts, end = self._walk_from(start, count)
        self.note(position + count, end)
        return firsts, end

    def first_of_round(self, epoch: int) -> Start:
        """Where the first output of an epoch begins."""
        return epoch * self._order.epoch_size

    def of_round(self, epoch: int, start: Any, count: int) -> tuple[np.ndarray, Start]:
        """Find the next `count` outputs of an epoch, or fewer at the epoch's end.

        Returns:
            The start of each output, int64 [up to count]; and the start of the output after them.
        """
        return self._walk_from(start, count, (epoch + 1) * self._order.epoch_size)

    def _walk_from(self, start: Any, count: int, stop: int | None = None) -> tuple[np.ndarray, int]:
        found, left, begun = [np.empty(0, dtype=np.int64)], count, place_and_offset(start)[0]
        while left and (stop is None or place_and_offset(start)[0] < stop):
            firsts, start = self._next(start, min(self._known_at_once, left), stop)
            found.append(firsts)
            left -= len(firsts)
            place = place_and_offset(start)[0]
            begun = place if len(firsts) else begun
            if place - begun > self._most_without_output:
                raise self._no_output_error()
        return np.concatenate(found), int(start)

    def _next(self, start: int, count: int, stop: int | None = None) -> tuple[np.ndarray, int]:
        """Some of the next outputs, at most `count`, and the start of the output after them."""
        if self._reading.window:
            return self._of_window(start, count)
        return self._cut(start, count, stop) if self._cuts else self._whole(start, stop)

    def _of_window(self, start: int, count: int) -> tuple[np.ndarray, int]:
        """Outputs of the window that contains the place of `start`; the window may have none."""
        place, number = place_and_offset(start)
        window = self._reading.window_at(place)
        behind = min(number + count, len(window.outputs))
        end = start_of(window.last, behind) if behind < len(window.outputs) else start_of(window.end, 0)
        return window.starts(np.arange(number, behind)), end

    @property
    def _cuts(self) -> bool:
        return bool(self._reading.cuts) or self._reading.units == 1

    @property
    def _reading(self) -> Any:
        if self._transform is None:
            raise ConfigError("this rank does not read, so it cannot find the outputs of the stream")
        return self._transform

    def _cut(self, start: int, count: int, stop: int | None = None) -> tuple[np.ndarray, int]:
        """Outputs that use all units in order; fewer than `count` if the places before `stop` have too few units."""
        place, offset = place_and_offset(start)
        units = self._reading.units
        ends = self._ends_until(place, offset + units * count, stop)
        total = int(ends[-1]) if len(ends) else 0
        count = min(count, max(0, -(-(total - offset) // units)))
        bounds = offset + units * np.arange(count + 1)
        firsts = np.searchsorted(ends, bounds[:-1], side="right")
        before = np.concatenate([[0], ends])
        if stop is not None and (not count or bounds[-1] > total):
            return start_of(place + self._apart * firsts, bounds[:-1] - before[firsts]), start_of(stop, 0)
        last = int(np.searchsorted(ends, bounds[-1], side="left"))
        # The end is right after the last used unit, so it does not depend on how many samples were measured ahead.
        end = (last + 1, 0) if ends[last] == bounds[-1] else (last, int(bounds[-1] - before[last]))
        firsts_at = place + self._apart * firsts
        return start_of(firsts_at, bounds[:-1] - before[firsts]), start_of(place + self._apart * end[0], end[1])

    def _whole(self, start: int, stop: int | None = None) -> tuple[np.ndarray, int]:
        """One output, made of complete samples; none if the samples before the place `stop` have no unit."""
        place, _ = place_and_offset(start)
        units = self._reading.units
        ends = self._ends_until(place, units, stop)
        first = int(np.searchsorted(ends, 0, side="right"))
        if stop is not None and (first == len(ends) or ends[-1] < units):
            return place + self._apart * np.arange(first, min(first + 1, len(ends))), start_of(stop, 0)
        last = int(np.searchsorted(ends, units, side="left"))
        behind = last + int(ends[last] == units)
        return np.array([place + self._apart * first]), place + self._apart * behind

    def _ends_until(self, place: int, bound: int, stop: int | None = None) -> np.ndarray:
        """The end of each sample from `place` on, in units, until one reaches `bound`, or until the place `stop`."""
        self._drop_before(place)
        total, empty = int(self._buffer.sum()), 0
        while total < bound or not len(self._buffer):
            behind = place + self._apart * len(self._buffer)
            if stop is not None and behind >= stop:
                break
            more = self._amounts(behind, stop)
            self._buffer = np.concatenate([self._buffer, more])
            total += int(more.sum())
            empty = 0 if more.any() else empty + len(more)
            if empty * self._apart > self._most_without_output:
                raise self._no_output_error()
        return np.cumsum(self._buffer)

    def _drop_before(self, place: int) -> None:
        """Drop the known amounts before a place, and keep those from this place on."""
        if not self._buffer_place <= place <= self._buffer_place + self._apart * len(self._buffer):
            self._buffer_place, self._buffer = place, self._buffer[:0]
        self._buffer = self._buffer[(place - self._buffer_place) // self._apart :]
        self._buffer_place = place

    def _amounts(self, place: int, stop: int | None) -> np.ndarray:
        count = _MEASURED_AT_ONCE if self._reading.reads_to_measure else self._known_at_once
        count = count if stop is None else min(count, -((place - stop) // self._apart))
        amounts: np.ndarray = self._reading.amounts(*self._order.locate(place + self._apart * np.arange(count)))
        return amounts

    @property
    def _most_without_output(self) -> int:
        """In places: after a whole epoch without a unit, a lane has seen all samples of its span."""
        return self._order.size + _KNOWN_AT_ONCE * self._apart

    def _no_output_error(self) -> ConfigError:
        name = type(self._transform).__name__
        if self._apart > 1:
            return ConfigError(
                f"{name} keeps none of the samples of one of the {self._apart} lanes, so this lane would have no rows. "
                "Use fewer lanes"
            )
        return ConfigError(f"{name} keeps none of the {self._order.size} samples, so there would be no batch")


class LanesWalk(Walk):
    """Walks through each lane separately: output q belongs to turn q mod lanes, and has only samples of this lane.

    So a start is a tuple with one start for each lane. Lanes may be in different epochs, except in rounds.
    """

    def __init__(self, transform: Any | None, order: Order, in_rounds: bool = False) -> None:
        super().__init__(transform, order, in_rounds)
        self._lanes = [Walk(transform, order, in_rounds) for _ in range(order.lanes)]

    @property
    def _first_start(self) -> Start:
        return tuple(range(len(self._lanes)))

    def note(self, position: int, start: Start) -> None:
        known = self._starts.get(position, UNKNOWN)
        if isinstance(known, tuple) and isinstance(start, tuple):
            start = tuple(old if new == UNKNOWN else new for old, new in zip(known, start))
        super().note(position, start)

    def outputs(self, position: int, count: int, turns: Sequence[int] | None = None) -> tuple[np.ndarray, Start]:
        """`Walk.outputs` of all lanes, or only of the lanes with these turns; all other starts are `UNKNOWN`."""
        turns = range(len(self._lanes)) if turns is None else turns
        starts = {turn: self._start_of(turn, position) for turn in turns}
        if not self._reading.reads_to_measure:
            self._measure(list(starts.values()), -(-count // len(self._lanes)))
        firsts, ends = np.full(count, UNKNOWN), len(self._lanes) * [UNKNOWN]
        for turn, start in starts.items():
            rows = np.arange((turn - position) % len(ends), count, len(ends))
            firsts[rows], ends[turn] = self._lanes[turn]._walk_from(start, len(rows))
        self.note(position + count, tuple(ends))
        return firsts, tuple(ends)

    def _start_of(self, turn: int, position: int) -> int:
        """The start of a lane's first output at or after a position."""
        first: int = _of_lane(self.known_start(position), turn)
        if first == UNKNOWN:
            known = (each for each, starts in self._starts.items() if _of_lane(starts, turn) != UNKNOWN)
            before = max((each for each in known if each < position), default=0)
            passed = len(range(before + (turn - before) % len(self._lanes), position, len(self._lanes)))
            _, first = self._lanes[turn]._walk_from(_of_lane(self.known_start(before), turn), passed)
        return first

    def first_of_round(self, epoch: int) -> Start:
        first = epoch * self._order.epoch_size
        return epoch, 0, *(first + (turn - first) % self._apart for turn in range(self._apart))

    def of_round(self, epoch: int, start: Any, count: int) -> tuple[np.ndarray, Start]:
        """`Walk.of_round`; the lanes take turns, and a lane without outputs left in the epoch is skipped.

        The start of an output is (epoch, turn of its lane, the start of the next output of each lane...).
        """
        stop, found = (epoch + 1) * self._order.epoch_size, [np.empty(0, dtype=np.int64)]
        _, turn, *starts = start
        while count:
            in_turn = [*range(turn, len(starts)), *range(turn)]
            unfinished = [each for each in in_turn if place_and_offset(starts[each])[0] < stop]
            if not unfinished:
                break
            rounds = -(-count // len(unfinished))
            if not self._reading.reads_to_measure:
                self._measure([starts[each] for each in unfinished], rounds, stop)
            of_lanes = [self._lanes[each].of_round(epoch, starts[each], rounds) for each in unfinished]
            dealt = np.full((rounds, len(unfinished)), UNKNOWN)
            for column, (firsts, _) in enumerate(of_lanes):
                dealt[: len(firsts), column] = firsts
            taken = np.flatnonzero(dealt.ravel() != UNKNOWN)[:count]
            found.append(dealt.ravel()[taken])
            count -= len(taken)
            for column, (each, (firsts, end)) in enumerate(zip(unfinished, of_lanes)):
                own = int(np.count_nonzero(taken % len(unfinished) == column))
                begin = int(firsts[own]) if own < len(firsts) else end
                is_over = place_and_offset(begin)[0] >= stop
                starts[each] = stop + (each - stop) % self._apart if is_over else begin
            if not count:
                turn = unfinished[(int(taken[-1]) + 1) % len(unfinished)]
        return np.concatenate(found), (epoch, turn, *starts)

    def _measure(self, starts: Sequence[int], count: int, stop: int | None = None) -> None:
        """Find the amounts for `count` outputs of each lane in one call, because numpy calls are expensive."""
        places, offsets = place_and_offset(np.array(starts))
        if self._reading.window:
            self._reading.pack_windows(places)
            return
        short = []
        for place, offset in zip(places.tolist(), offsets.tolist()):
            lane = self._lanes[place % self._apart]
            lane._drop_before(place)
            if lane._buffer.sum() < offset + count * self._reading.units:
                short.append(lane)
        if short:
            behind = np.array([lane._buffer_place + lane._apart * len(lane._buffer) for lane in short])
            more = behind[:, None] + self._apart * np.arange(self._known_at_once)
            amounts = self._reading.amounts(*self._order.locate(more.ravel())).reshape(more.shape)
            for lane, row, places in zip(short, amounts, more):
                lane._buffer = np.concatenate([lane._buffer, row if stop is None else row[places < stop]])


def different_starts(starts: np.ndarray) -> str:
    """Describe the first lane for which ranks know different starts of the next output; "" if all ranks agree.

    Args:
        starts: int64 [ranks, lanes], the starts that each rank knows; otherwise `UNKNOWN`.
    """
    latest = starts.max(axis=0)
    _, lanes = np.nonzero((starts != latest) & (starts != UNKNOWN))
    if not len(lanes):
        return ""
    known = {rank: start for rank, start in enumerate(starts[:, lanes[0]].tolist()) if start != UNKNOWN}
    words = by_rank({rank: str([*place_and_offset(start)]) for rank, start in known.items()})
    return f"the start of a lane differs: {words}"


def _of_lane(start: Any, turn: int) -> int:
    return start[turn] if isinstance(start, tuple) else UNKNOWN
