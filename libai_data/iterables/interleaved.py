"""Rows of several shards in turn, and the place in each shard."""

from __future__ import annotations

import json
import operator
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Callable, NamedTuple

from libai_data.errors import CheckpointError
from libai_data.iterables.digest import running_digest
from libai_data.iterables.failed_rows import FailedRow
from libai_data.iterables.iterable_source import Source
from libai_data.iterables.plain_state import saved_in
from libai_data.iterables.shared_use import Opened

_SHARDS = "__shards__"
_ROWS_COMPARED = 8


class ShardPlace(NamedTuple):
    """A place in a shard."""

    taken: int = 0  # number of rows before the place
    row: int = 0  # the row at which `state` was saved; at or before the place
    state: str | None = None  # state of the shard's source before `row`; None for the beginning
    ended: bool = False  # there are no more rows


class ShardPart(NamedTuple):
    """Some rows of a shard."""

    rows: list[Any]
    place: ShardPlace  # where the part begins
    keeps_state: bool | None  # whether the source of the shard has states; None if this is not known


def part_read(place: ShardPlace, rows: list[Any], ended: bool, state: str | None) -> tuple[ShardPart, ShardPlace]:
    """The part with `rows`, which begins at `place`, and the place behind the part, which has `ended` and `state`."""
    taken = place.taken + len(rows)
    after = place._replace(taken=taken, ended=ended) if state is None else ShardPlace(taken, taken, state, ended)
    return ShardPart(rows, place, None if ended else state is not None), after


class _ShardRows:
    """The rows of one shard, part by part."""

    def __init__(self, parts: Iterator[ShardPart], place: ShardPlace) -> None:
        self.place = place
        self.keeps_state: bool | None = True if place.state is not None else None
        self._parts = parts
        self._waiting: deque[Any] = deque()

    def next_row(self) -> Any:
        """The next row; raises StopIteration at the end."""
        while not self._waiting:
            try:
                part = next(self._parts)
            except StopIteration:
                self.place = ShardPlace(self.place.taken, ended=True)
                raise
            self._waiting.extend(part.rows)
            self.place = part.place
            if part.keeps_state is not None:
                self.keeps_state = part.keeps_state
        self.place = self.place._replace(taken=self.place.taken + 1)
        return self._waiting.popleft()


class Interleaved:
    """Yields a row of each shard in turn, and skips shards that have ended.

    Args:
        parts: the parts of each shard, from its place on.
        refuse_equal: called with two shards whose first rows are equal, and the number of these rows.
    """

    def __init__(
        self,
        parts: Sequence[Iterator[ShardPart]],
        places: Sequence[ShardPlace],
        refuse_equal: Callable[[int, int, int], None],
    ) -> None:
        self._shards = [_ShardRows(each, place) for each, place in zip(parts, places)]
        self._digests, self._counts = [""] * len(parts), [0] * len(parts)
        self._refuse_equal = refuse_equal
        self._compares = not any(place.taken for place in places)

    def rows(self) -> Iterator[Any]:
        """The rows of all shards."""
        running = [number for number, shard in enumerate(self._shards) if not shard.place.ended]
        turn = min((self._shards[number].place.taken for number in running), default=0)
        while running:
            for number in list(running):
                shard = self._shards[number]
                if shard.place.taken > turn:
                    continue
                try:
                    row = shard.next_row()
                except StopIteration:
                    running.remove(number)
                    self._compare(number)
                    continue
                if self._compares and self._counts[number] < _ROWS_COMPARED and not isinstance(row, FailedRow):
                    self._counts[number] += 1
                    self._digests[number] = running_digest(self._digests[number], row)
                    if self._counts[number] == _ROWS_COMPARED:
                        self._compare(number)
                yield row
            turn += 1

    def _compare(self, number: int) -> None:
        """Compare the first rows of a shard with those of the shards before it."""
        count = self._counts[number]
        for other in range(number):
            if self._digests[other] and (self._counts[other], self._digests[other]) == (count, self._digests[number]):
                self._refuse_equal(other, number, count)

    def state(self) -> str | None:
        """The place of each shard, as JSON text; None if the shards have no states."""
        have_states = {shard.keeps_state for shard in self._shards}
        if False in have_states or True not in have_states:
            return None
        return json.dumps({_SHARDS: [_packed(shard.place) for shard in self._shards]})


def _packed(place: ShardPlace) -> list[Any]:
    if place.ended:
        return [place.taken]
    return [place.taken, place.row, None if place.state is None else json.loads(place.state)]


def open_round(source: Source, epoch: int, shard: int, num_shards: int, state: str | None) -> Opened:
    """Open an epoch of a source, at a state of the source or of an `Interleaved` with one shard."""
    places = places_in(state, 1)
    if len(places) != 1:
        return source.open(epoch, shard, num_shards, state)
    return open_at(source, epoch, shard, num_shards, places[0])


def open_at(source: Source, epoch: int, shard: int, num_shards: int, place: ShardPlace) -> Opened:
    """Open an epoch of a source at the state of a place, and skip the rows between the state and the place."""
    rows, save = source.open(epoch, shard, num_shards, place.state)
    left = place.taken - place.row - sum(1 for _ in islice(rows, place.taken - place.row))
    if left:
        raise CheckpointError(
            f"shard {shard} of {source.name} has become shorter: it ended {left} rows before row {place.taken} of "
            f"epoch {epoch}, which was read already. A shard must yield the same rows each time that it is opened"
        )
    return rows, save


def places_in(state: str | None, shards: int) -> list[ShardPlace]:
    """The places in a state of `Interleaved`, or of a source that was read as a whole; None for the beginning."""
    if state is None:
        return [ShardPlace()] * shards
    with saved_in(state) as saved:
        if not (isinstance(saved, dict) and _SHARDS in saved):
            if shards > 1:
                raise ValueError(f"no places of {shards} shards")
            return [ShardPlace(state=state)]
        return [
            ShardPlace(operator.index(taken), ended=True)
            if not rest
            else ShardPlace(
                operator.index(taken), operator.index(rest[0]), None if rest[1] is None else json.dumps(rest[1])
            )
            for taken, *rest in saved[_SHARDS]
        ]
