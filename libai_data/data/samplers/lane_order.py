"""The order of data in shards: samples of one shard are close together, and each reader reads its own shards.

Place p belongs to turn p mod L, and each turn belongs to one lane. A lane owns a span of the shards. The rows of a
global batch are sorted by lane, so readers of contiguous rows read different shards. docs/order.md explains lanes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import count
from math import gcd
from typing import Any

import numpy as np

from libai_data.data.cached_property import cached_property
from libai_data.data.datasets.combine import length_of
from libai_data.data.datasets.fingerprint import hash_of
from libai_data.data.datasets.shard_lengths import shard_lengths_of
from libai_data.data.datasets.stream_transform import remember
from libai_data.data.random.permutation import permuted_each, places_in_each
from libai_data.data.samplers.lane_visits import VISITS_VERSION, LaneVisits, ShardRow, Visits
from libai_data.data.samplers.order import Order
from libai_data.data.shard_use import ShardUse, most_of_turns
from libai_data.errors import CheckpointError, ConfigError
from libai_data.errors.argument_rules import check, or_none, whole

BLOCK = 4
"""Default number of shards that a lane shuffles together."""

_RULES = {"lanes": or_none(whole(1, 1 << 16)), "block": or_none(whole(1))}
_SPANS_KEPT = 8
_TABLES_OF_LANE = 8


@dataclass(frozen=True)
class LaneOrder(Order):
    """Place -> (epoch, index); samples of one shard have places that are close together.

    Args:
        size: number of samples in the dataset.
        lanes: number of lanes.
        block: shards that a lane shuffles together, at most.
        digest: digest of the shards' lengths; a state stores it instead of the lengths.
        lengths: int64 [shards], the samples of each shard; None if only the digest is known.
    """

    lanes: int = 1
    block: int = BLOCK
    digest: str = ""
    lengths: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def can_locate(self) -> bool:
        return self.lengths is not None

    @cached_property
    def _visits(self) -> LaneVisits:
        if self.lengths is None:
            raise CheckpointError(
                "the order has lanes, and the data state holds only a digest of the shards' lengths; build the "
                "loader of this dataset to find samples (with a command: --config-file)"
            )
        row = ShardRow.of(self.lengths, self.seed, self.shuffle)
        return LaneVisits(row, self.block, self.seed, self.shuffle, _TABLES_OF_LANE * self.lanes)

    @cached_property
    def _row_places(self) -> np.ndarray:
        """The place of each shard in the row, int64 [shards]; 0 for empty ones."""
        row = self._visits.row
        places = np.zeros(len(row.starts) - 1, dtype=np.int64)
        places[row.shards] = np.arange(len(row.shards))
        return places

    @cached_property
    def _lane_of_turn(self) -> np.ndarray:
        return lane_of_turn(self.lanes)

    @cached_property
    def _turn_of_lane(self) -> np.ndarray:
        return np.argsort(self._lane_of_turn)

    @cached_property
    def _spans(self) -> OrderedDict[int, np.ndarray]:
        return OrderedDict()

    @cached_property
    def _turns(self) -> OrderedDict[tuple[range, int], list[int]]:
        return OrderedDict()

    def _span_edges(self, epoch: int) -> np.ndarray:
        """Samples of the row before each lane's span in an epoch, int64 [lanes + 1].

        Without `drop_last`, a lane has a place in the epoch for each sample of its span. So its size varies by one.
        """
        edges: np.ndarray | None = self._spans.get(epoch)
        if edges is None:
            share, more = divmod(self.size, self.lanes)
            late = (self._turn_of_lane - epoch * self.epoch_size) % self.lanes
            edges = np.zeros(self.lanes + 1, dtype=np.int64)
            np.cumsum(share + (late < more), out=edges[1:])
            remember(self._spans, epoch, edges, _SPANS_KEPT)
        return edges

    def _span(self, epoch: int, lane: int) -> tuple[int, int]:
        low, high = self._span_edges(epoch)[lane : lane + 2].tolist()
        return low, high

    def rows_by_lane(self, places: np.ndarray) -> np.ndarray:
        return np.argsort(self._lane_of_turn[places % self.lanes].astype(np.uint16), axis=-1, kind="stable")

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        places = np.asarray(positions, dtype=np.int64)
        epochs, offsets = np.divmod(places, self.epoch_size)
        if not len(places):
            return epochs, offsets
        lanes, turns = self._lane_of_turn[places % self.lanes], offsets // self.lanes
        pairs, of_lane = np.unique(epochs * self.lanes + lanes, return_inverse=True)
        own = np.divmod(pairs, self.lanes)
        spans = np.array([self._span(*each) for each in zip(*(part.tolist() for part in own))])
        ends, found = _search_each([table.edges for table in self._visits.groups_of(*own, spans)], of_lane, turns)
        parts, firsts, of_part = np.unique(found, return_index=True, return_inverse=True)
        lane = of_lane[firsts]
        numbers = parts - ends[lane]
        tables = self._visits.visits_of(own[0][lane], own[1][lane], spans[lane], numbers)
        within = turns - np.array([table.start for table in tables])[of_part]
        _, blocks = _search_each([table.block_edges for table in tables], of_part, within)
        indices = within
        if self.shuffle:
            begins = np.concatenate([table.block_edges[:-1] for table in tables])[blocks]
            sizes = np.concatenate([np.diff(table.block_edges) for table in tables])[blocks].astype(np.uint64)
            keys = np.concatenate([table.block_keys for table in tables])[blocks]
            indices = begins + permuted_each(sizes, keys, within - begins)
        _, shards = _search_each([table.edges for table in tables], of_part, indices)
        moves = np.concatenate([table.firsts - table.edges[:-1] for table in tables])
        return epochs, indices + moves[shards]

    def _places_in_epoch(self, epoch: int, index: int) -> Sequence[int]:
        visits, block, within, first = self._visit_of(epoch, index)
        begin, end = visits.block_edges[block : block + 2].tolist()
        inner = within - begin
        if self.shuffle:
            size = np.array([end - begin], dtype=np.uint64)
            inner = int(places_in_each(size, visits.block_keys[block : block + 1], np.array([inner]))[0])
        place = first + (visits.start + begin + inner) * self.lanes
        return [place] if place < (epoch + 1) * self.epoch_size else []

    def _visit_of(self, epoch: int, index: int) -> tuple[Visits, int, int, int]:
        """Where a sample is: the visits of its group, its block, the number of samples of the group before it (without
        shuffling), and the first place of the lane in the epoch."""
        row = self._visits.row
        shard = int(np.searchsorted(row.starts, index, side="right")) - 1
        in_row = int(self._row_places[shard])
        offset = int(row.edges[in_row]) + index - int(row.starts[shard])
        lane = int(np.searchsorted(self._span_edges(epoch), offset, side="right")) - 1
        span = self._span(epoch, lane)
        groups = self._visits.groups(epoch, lane, span)
        group = int(np.searchsorted(groups.bounds, in_row, side="right")) - 1
        visits = self._visits.visits(epoch, lane, span, int(np.flatnonzero(groups.order == group)[0]))
        piece = int(np.flatnonzero(visits.places == in_row)[0])
        within = int(visits.edges[piece]) + index - int(visits.firsts[piece])
        block = int(np.searchsorted(visits.block_edges, within, side="right")) - 1
        return visits, block, within, self._first_place(epoch, lane)

    def _first_place(self, epoch: int, lane: int) -> int:
        start = epoch * self.epoch_size
        return start + (int(self._turn_of_lane[lane]) - start) % self.lanes

    def lanes_of(self, rows: range, batch_size: int) -> np.ndarray:
        """The lanes whose samples are in these rows of global batches, int64 [n].

        Let the rows be one of D equal parts. If D is a product as in `lane_of_turn`, or D divides `lanes` and `lanes`
        divides the batch size, no other part has samples of these lanes. Otherwise, parts may share lanes.
        """
        share, more = divmod(batch_size, self.lanes)
        found = np.zeros(self.lanes, dtype=bool)
        for turn in range(0, self.lanes, gcd(batch_size, self.lanes)):  # the turns with which a batch may begin
            sizes = share + ((self._turn_of_lane - turn) % self.lanes < more)
            ends = np.cumsum(sizes)
            found |= (sizes > 0) & (ends - sizes < rows.stop) & (ends > rows.start)
        return np.flatnonzero(found)

    def turns_of(self, rows: range, batch_size: int) -> list[int]:
        """The turns of the lanes that `lanes_of` returns."""
        turns = self._turns.get((rows, batch_size))
        if turns is None:
            turns = self._turn_of_lane[self.lanes_of(rows, batch_size)].tolist()
            remember(self._turns, (rows, batch_size), turns, _SPANS_KEPT)
        return turns

    def shard_uses(self, rows: range, batch_size: int, first_batch: int = 0) -> Iterator[ShardUse]:
        """The shards that a reader needs, without end, in the order of their first use. Uses that end before
        `first_batch` are left out. The rows that the reader reads of each global batch are contiguous.

        The samples of a block are shuffled, so its shards are in use from the block's first sample to its last one. If
        a shard is read in several blocks, it is yielded once for each block.
        """
        lanes = self.lanes_of(rows, batch_size).tolist()
        uses = (self._uses_of_lane(lane, batch_size, first_batch) for lane in lanes)
        return merge(*uses, key=lambda use: use.first)

    def _uses_of_lane(self, lane: int, batch_size: int, first_batch: int) -> Iterator[ShardUse]:
        start = first_batch * batch_size
        for shard, low, high in self.visits_from(lane, start):
            yield ShardUse(shard, max(low, start) // batch_size, high // batch_size)

    def visits_from(self, lane: int, start: int) -> Iterator[tuple[int, int, int]]:
        """The shards that a lane visits, without end: each with the first and the last place of its block. Blocks that
        end before the place `start` are left out."""
        for epoch in count(start // self.epoch_size):
            span, first = self._span(epoch, lane), self._first_place(epoch, lane)
            if span[0] == span[1]:
                continue
            ends = first + (self._visits.groups(epoch, lane, span).edges[1:] - 1) * self.lanes
            for number in np.flatnonzero(ends >= start).tolist():
                visits = self._visits.visits(epoch, lane, span, number)
                shards = self._visits.row.shards[visits.places]
                bounds = visits.block_edges.tolist()
                for block, (begin, end) in enumerate(zip(bounds, bounds[1:])):
                    low = first + (visits.start + begin) * self.lanes
                    high = min(first + (visits.start + end - 1) * self.lanes, (epoch + 1) * self.epoch_size - 1)
                    if start <= high and low <= high:
                        for shard in shards[slice(*visits.block_shards[block : block + 2])].tolist():
                            yield shard, low, high

    def most_bytes(self, rows: range, batch_size: int, batches: int, sizes: np.ndarray) -> int:
        """An upper bound of the bytes of shards (their sizes, int64 [shards]) that a reader needs for any so many
        consecutive batches; see `shard_uses`."""
        row, (share, more) = self._visits.row, divmod(self.size, self.lanes)
        turns, found = -(-batches * batch_size // self.lanes), 0
        for lane in self.lanes_of(rows, batch_size).tolist():
            # The bounds over all epochs, in samples of the row, of the begin (low) and of the end (high) of the span.
            low, high = (
                (end * share + max(0, more - (self.lanes - end)), end * share + min(end, more))
                for end in (lane, lane + 1)
            )
            first = np.searchsorted(row.edges, low[0], side="right") - 1
            behind = np.searchsorted(row.edges, high[1], side="left")
            lengths = np.diff(np.clip(row.edges[first : behind + 1], low[1], high[0]))
            found += most_of_turns(turns, self.block, lengths, sizes[row.shards[first:behind]])
        return found

    def next_use(self, shard: int, batch_size: int, batch: int) -> int:
        """The first batch after `batch` in which a block with this shard begins, in any lane."""
        return self.next_begin(shard, (batch + 1) * batch_size) // batch_size

    def next_begin(self, shard: int, start: int) -> int:
        """The first place at or after `start` at which a block with this shard begins, in any lane."""
        row, in_row, epoch = self._visits.row, int(self._row_places[shard]), start // self.epoch_size
        low, high = row.edges[in_row : in_row + 2].tolist()
        for each in (epoch, epoch + 1, epoch + 2):
            # A shard may belong to several lanes, which read it at different times.
            edges = self._span_edges(each)
            firsts = {low, *edges[(edges > low) & (edges < high)].tolist()}
            visits = [self._visit_of(each, int(row.starts[shard]) + first - low) for first in firsts]
            begins = [first + (own.start + int(own.block_edges[block])) * self.lanes for own, block, _, first in visits]
            found = [place for place in begins if start <= place < (each + 1) * self.epoch_size]
            if found:
                return min(found)
        return (epoch + 3) * self.epoch_size

    def in_words(self) -> str:
        return f"in {self.lanes} lanes, blocks of {self.block} shards, {super().in_words()}"

    def to_json(self) -> dict[str, Any]:
        lanes = {"lanes": self.lanes, "block": self.block, "digest": self.digest}
        return {**super().to_json(), "order_version": VISITS_VERSION, "lanes": lanes}


def lane_of_turn(lanes: int) -> np.ndarray:
    """The lane of each turn of a round, int64 [lanes].

    The digits of the turn's number are reversed, in a mixed base of the prime factors of `lanes`, ascending. Let D be a
    product of the first of these factors, and cut the lanes into D equal parts. Then each part has one of any D
    consecutive places. So each of D readers reads only its part's lanes, also if a batch is no multiple of `lanes`.
    """
    turns, found, rest = np.arange(lanes, dtype=np.int64), np.zeros(lanes, dtype=np.int64), lanes
    factor = 2
    while rest > 1:
        while rest % factor == 0:
            rest //= factor
            found += turns % factor * rest
            turns //= factor
        factor += 1
    return found


def laned_order(
    dataset: Any, seed: int, shuffle: bool, lanes: int | None, block: int | None, weights: Any = None
) -> LaneOrder | None:
    """The order in lanes of a dataset with shards (`shard_lengths_of`); None without lanes.

    The arguments are those of `CyclicSampler`. Without `shuffle`, each lane reads its span from first to last sample.
    """
    check(_RULES, lanes=lanes, block=block)
    if lanes is None:
        if block is not None:
            raise ConfigError(
                f"block is {block}, but lanes is not set; block is the number of shards that a lane shuffles together: "
                "set lanes, too"
            )
        return None
    if weights is not None:
        raise ConfigError(f"lanes is {lanes}, but weights are given, too; remove one of the two")
    lengths = shard_lengths_of(dataset)
    digest = hash_of(lengths.tobytes(), 8)
    samples = length_of(dataset)
    return LaneOrder(samples, seed, shuffle, 0, int(lanes), BLOCK if block is None else int(block), digest, lengths)


def _search_each(
    tables: Sequence[np.ndarray], numbers: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Search each value in its own table of edges; the value is below the last edge of the table.

    Returns:
        Where each table begins in the concatenation of all ranges between edges, and the range of each value in it.
    """
    ends = np.concatenate([table[1:] for table in tables])
    sizes = np.array([len(table) - 1 for table in tables])
    apart = np.arange(len(tables)) * int(ends.max())
    return np.cumsum(sizes) - sizes, (ends + apart.repeat(sizes)).searchsorted(values + apart[numbers], side="right")
