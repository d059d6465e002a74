"""The walk: finds where each output of a stream transform begins, by going through the samples in order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from libai_data.data.datasets.stream_transform import (
    MOST_PLACES,
    Start,
    place_and_offset,
    remember,
    start_of,
    starts_of,
)
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

    Output q belongs to turn q mod lanes, and has only samples of this lane. So a start is a tuple with one start for
    each lane. Without lanes, a start is a number. Lanes may be in different epochs, except in rounds.

    The walk remembers the last starts that it found. A known start costs nothing. For any other position, the walk
    begins at the last known start before it, or at the beginning of the stream.

    Args:
        transform: the stream transform; None on a rank that does not read, which gets the starts from other ranks.
        order: the order of the samples.
        in_rounds: whether no output has samples of two epochs.
    """

    def __init__(self, transform: Any | None, order: Order, in_rounds: bool = False) -> None:
        self._order = order
        self._lanes = [_LaneWalk(transform, order) for _ in range(order.lanes)]
        self._starts: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._remembered = max(_REMEMBERED // order.lanes, _LEAST_REMEMBERED)
        if transform is not None:
            transform.follow_order(order, in_rounds)

    def note(self, position: int, start: Start) -> None:
        """Remember where the output at a position begins; of lanes, those starts that are known."""
        if start != UNKNOWN:
            new = starts_of(start)
            known = zip(self._starts.get(position, new), new)
            starts = tuple(before if after == UNKNOWN else after for before, after in known)
            remember(self._starts, position, starts, self._remembered)

    def known_start(self, position: int) -> Start:
        """Where the output at a position begins, or `UNKNOWN`."""
        if position and position not in self._starts:
            return UNKNOWN
        return self._as_start([self._known(position, turn) for turn in range(len(self._lanes))])

    def _as_start(self, starts: Sequence[int]) -> Start:
        return tuple(starts) if len(self._lanes) > 1 else starts[0]

    def _known(self, position: int, turn: int) -> int:
        """The start of a lane's first output at or after a position, or `UNKNOWN`."""
        if not position:
            return turn
        return self._starts[position][turn] if position in self._starts else UNKNOWN

    def outputs(self, position: int, count: int, turns: Sequence[int] | None = None) -> tuple[np.ndarray, Start]:
        """Find `count` outputs, beginning at a position; of lanes, only those of some turns, all others' are `UNKNOWN`.

        A ConfigError if about as many consecutive samples as an epoch has yield no output.

        Returns:
            The start of each output, int64 [count]; and the start of the output after them.
        """
        lanes = len(self._lanes)
        turns = range(lanes) if turns is None else turns
        starts = {turn: self._start_of(turn, position) for turn in turns}
        if position not in self._starts:
            self.note(position, self._as_start([starts.get(turn, UNKNOWN) for turn in range(lanes)]))
        self._measure(list(starts.values()), -(-count // lanes))
        firsts, ends = np.full(count, UNKNOWN), lanes * [UNKNOWN]
        for turn, start in starts.items():
            rows = np.arange((turn - position) % lanes, count, lanes)
            firsts[rows], ends[turn] = self._lanes[turn].walk_from(start, len(rows))
        end = self._as_start(ends)
        self.note(position + count, end)
        return firsts, end

    def _start_of(self, turn: int, position: int) -> int:
        """The start of a lane's first output at or after a position."""
        first = self._known(position, turn)
        if first == UNKNOWN:
            known = (each for each, starts in self._starts.items() if starts[turn] != UNKNOWN)
            before = max((each for each in known if each < position), default=0)
            passed = len(range(before + (turn - before) % len(self._lanes), position, len(self._lanes)))
            first = self._known(before, turn)
            for done in range(0, passed, _KNOWN_AT_ONCE):  # Not all at once, because their starts need memory.
                _, first = self._lanes[turn].walk_from(first, min(_KNOWN_AT_ONCE, passed - done))
        return first

    def first_of_round(self, epoch: int) -> Start:
        """Where the first output of an epoch begins; a ConfigError if its places are too large for a start."""
        size, lanes = self._order.epoch_size, len(self._lanes)
        first = epoch * size
        last = (MOST_PLACES - 1) // size - 1
        if epoch > last:
            raise ConfigError(f"epoch {epoch} of {size} samples is too late for a filter or packer; the last is {last}")
        return self._in_round(epoch, 0, [first + (turn - first) % lanes for turn in range(lanes)])

    def _in_round(self, epoch: int, turn: int, starts: Sequence[int]) -> Start:
        return (epoch, turn, *starts) if len(self._lanes) > 1 else starts[0]

    def of_round(self, epoch: int, start: Any, count: int) -> tuple[np.ndarray, Start]:
        """Find the next `count` outputs of an epoch, or fewer at its end. Returns as `outputs`.

        The lanes take turns, and a lane without outputs left in the epoch is skipped. With lanes, the start of an
        output is (epoch, turn of its lane, the start of the next output of each lane...).
        """
        stop, found = (epoch + 1) * self._order.epoch_size, [np.empty(0, dtype=np.int64)]
        _, turn, *starts = start if isinstance(start, tuple) else (epoch, 0, start)
        while count:
            in_turn = [*range(turn, len(starts)), *range(turn)]
            unfinished = [each for each in in_turn if place_and_offset(starts[each])[0] < stop]
            if not unfinished:
                break
            rounds = min(-(-count // len(unfinished)), _KNOWN_AT_ONCE)
            self._measure([starts[each] for each in unfinished], rounds, stop)
            of_lanes = [self._lanes[each].walk_from(starts[each], rounds, stop) for each in unfinished]
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
                starts[each] = stop + (each - stop) % len(starts) if is_over else begin
            if not count:
                turn = unfinished[(int(taken[-1]) + 1) % len(unfinished)]
        return np.concatenate(found), self._in_round(epoch, turn, starts)

    def _measure(self, starts: Sequence[int], count: int, stop: int | None = None) -> None:
        """Find the amounts for `count` outputs of each lane in one call, because numpy calls are expensive."""
        if len(self._lanes) == 1 or self._lanes[0].reading.reads_to_measure:
            return
        reading = self._lanes[0].reading
        places, offsets = place_and_offset(np.array(starts))
        if reading.window:
            reading.pack_windows(places)
            return
        short = []
        for place, offset in zip(places.tolist(), offsets.tolist()):
            lane = self._lanes[place % len(self._lanes)]
            lane.drop_before(place)
            if lane.buffer.sum() < offset + count * reading.units:
                short.append(lane)
        if short:
            behind = np.array([lane.buffer_place + lane.apart * len(lane.buffer) for lane in short])
            more = behind[:, None] + len(self._lanes) * np.arange(short[0].known_at_once)
            amounts = reading.amounts(*self._order.locate(more.ravel())).reshape(more.shape)
            for lane, row, places in zip(short, amounts, more):
                lane.buffer = np.concatenate([lane.buffer, row if stop is None else row[places < stop]])


class _LaneWalk:
    """Goes through the samples of one lane, every `lanes`-th place."""

    def __init__(self, transform: Any | None, order: Order) -> None:
        self._transform, self._order = transform, order
        self.apart = order.lanes
        self.known_at_once = max(_KNOWN_AT_ONCE // order.lanes, _LEAST_AT_ONCE)
        self.buffer_place = 0
        self.buffer = np.empty(0, dtype=np.int64)
        """The units of each sample from `buffer_place` on, as far as they are known."""

    def walk_from(self, start: Any, count: int, stop: int | None = None) -> tuple[np.ndarray, int]:
        """The starts of `count` outputs from a start on, fewer before the place `stop`; and the start after them."""
        found, left, begun = [np.empty(0, dtype=np.int64)], count, place_and_offset(start)[0]
        while left and (stop is None or place_and_offset(start)[0] < stop):
            most = min(self.known_at_once, left)
            if self.reading.window:
                firsts, start = self._of_window(start, most)
            elif self.reading.cuts or self.reading.units == 1:
                firsts, start = self._cut(start, most, stop)
            else:
                firsts, start = self._whole(start, stop)
            found.append(firsts)
            left -= len(firsts)
            place = place_and_offset(start)[0]
            begun = place if len(firsts) else begun
            if place - begun > self._most_without_output:
                raise self._no_output_error()
        return np.concatenate(found), int(start)

    def _of_window(self, start: int, count: int) -> tuple[np.ndarray, int]:
        """Outputs of the window that contains the place of `start`; the window may have none."""
        place, number = place_and_offset(start)
        window = self.reading.window_at(place)
        behind = min(number + count, len(window.outputs))
        end = start_of(window.last, behind) if behind < len(window.outputs) else start_of(window.end, 0)
        return window.starts(np.arange(number, behind)), end

    @property
    def reading(self) -> Any:
        """The transform; a ConfigError on a rank that does not read."""
        if self._transform is None:
            raise ConfigError("this rank does not read, so it cannot find the outputs of the stream")
        return self._transform

    def _cut(self, start: int, count: int, stop: int | None) -> tuple[np.ndarray, int]:
        """Outputs that use all units in order; fewer than `count` if the places before `stop` have too few units."""
        place, offset = place_and_offset(start)
        units = self.reading.units
        ends = self._ends_until(place, offset + units * count, stop)
        total = int(ends[-1]) if len(ends) else 0
        count = min(count, max(0, -(-(total - offset) // units)))
        bounds = offset + units * np.arange(count + 1)
        firsts = np.searchsorted(ends, bounds[:-1], side="right")
        before = np.concatenate([[0], ends])
        starts = start_of(place + self.apart * firsts, bounds[:-1] - before[firsts])
        if stop is not None and (not count or bounds[-1] > total):
            return starts, start_of(stop, 0)
        last = int(np.searchsorted(ends, bounds[-1], side="left"))
        # The end is right after the last used unit, so it does not depend on how many samples were measured ahead.
        end = (last + 1, 0) if ends[last] == bounds[-1] else (last, int(bounds[-1] - before[last]))
        return starts, start_of(place + self.apart * end[0], end[1])

    def _whole(self, start: int, stop: int | None) -> tuple[np.ndarray, int]:
        """One output, made of complete samples; none if the samples before the place `stop` have no unit."""
        place, _ = place_and_offset(start)
        units = self.reading.units
        ends = self._ends_until(place, units, stop)
        first = int(np.searchsorted(ends, 0, side="right"))
        if stop is not None and (first == len(ends) or ends[-1] < units):
            return place + self.apart * np.arange(first, min(first + 1, len(ends))), start_of(stop, 0)
        last = int(np.searchsorted(ends, units, side="left"))
        behind = last + int(ends[last] == units)
        return np.array([place + self.apart * first]), place + self.apart * behind

    def _ends_until(self, place: int, bound: int, stop: int | None) -> np.ndarray:
        """The end of each sample from `place` on, in units, until one reaches `bound`, or until the place `stop`."""
        self.drop_before(place)
        total, empty = int(self.buffer.sum()), 0
        while total < bound or not len(self.buffer):
            behind = place + self.apart * len(self.buffer)
            if stop is not None and behind >= stop:
                break
            count = _MEASURED_AT_ONCE if self.reading.reads_to_measure else self.known_at_once
            count = count if stop is None else min(count, -((behind - stop) // self.apart))
            more = self.reading.amounts(*self._order.locate(behind + self.apart * np.arange(count)))
            self.buffer = np.concatenate([self.buffer, more])
            total += int(more.sum())
            empty = 0 if more.any() else empty + len(more)
            if empty * self.apart > self._most_without_output:
                raise self._no_output_error()
        return np.cumsum(self.buffer)

    def drop_before(self, place: int) -> None:
        """Drop the known amounts before a place, and keep those from this place on."""
        if not self.buffer_place <= place <= self.buffer_place + self.apart * len(self.buffer):
            self.buffer_place, self.buffer = place, self.buffer[:0]
        self.buffer = self.buffer[(place - self.buffer_place) // self.apart :]
        self.buffer_place = place

    @property
    def _most_without_output(self) -> int:
        """In places: after a whole epoch without a unit, a lane has seen all samples of its span."""
        return self._order.size + _KNOWN_AT_ONCE * self.apart

    def _no_output_error(self) -> ConfigError:
        name = type(self._transform).__name__
        if self.apart > 1:
            return ConfigError(
                f"{name} keeps none of the samples of one of the {self.apart} lanes, so this lane would have no rows. "
                "Use fewer lanes"
            )
        return ConfigError(f"{name} keeps none of the {self._order.size} samples, so there would be no batch")


def different_starts(starts: np.ndarray) -> str:
    """Describe the first lane for which ranks know different starts of the next output; "" if all ranks agree. `starts`
    are int64 [ranks, lanes]; `UNKNOWN` if a rank does not know the start."""
    latest = starts.max(axis=0)
    _, lanes = np.nonzero((starts != latest) & (starts != UNKNOWN))
    if not len(lanes):
        return ""
    known = {rank: start for rank, start in enumerate(starts[:, lanes[0]].tolist()) if start != UNKNOWN}
    words = by_rank({rank: str([*place_and_offset(start)]) for rank, start in known.items()})
    return f"the start of a lane differs: {words}"
