"""The visits of a lane: which shards it reads in an epoch, in which order, and which samples of them come when.

The shards of a lane are cut into groups of at most 256 neighbours. Each epoch permutes the groups, and the shards of
each group. So a place in the epoch is found by two short tables, however many shards there are.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Callable, NamedTuple, TypeVar

import numpy as np

from libai_data.data.datasets.stream_transform import remember
from libai_data.data.random.hashing import combine64, mix64_array
from libai_data.data.random.permutation import permuted

VISITS_VERSION = 1
"""Raised whenever the same (shard lengths, lanes, block, seed, epoch, place) would give another sample."""

_GROUP = 256
_ROW, _GROUPS, _SHARDS = range(3)
_AT_ONCE = 1 << 16
_Table = TypeVar("_Table")


class ShardRow(NamedTuple):
    """All shards that have samples in one row, which the lanes cut into spans.

    Args:
        starts: int64 [shards + 1], the index of each shard's first sample in the dataset.
        shards: int64 [n], the numbers of the shards in the order of the row.
        edges: int64 [n + 1], samples before each place of the row.
    """

    starts: np.ndarray
    shards: np.ndarray
    edges: np.ndarray

    @classmethod
    def of(cls, lengths: np.ndarray, seed: int, shuffle: bool) -> ShardRow:
        """The row of shards of these lengths; with `shuffle` in a random order that the seed decides."""
        shards = np.flatnonzero(lengths)
        if shuffle:
            order, key = np.arange(len(shards)), combine64(VISITS_VERSION, seed, _ROW)
            for first in range(0, len(order), _AT_ONCE):
                order[first : first + _AT_ONCE] = permuted(len(order), key, 0, order[first : first + _AT_ONCE])
            shards = shards[order]
        return cls(_summed(lengths), shards, _summed(lengths[shards]))


class Groups(NamedTuple):
    """The groups that a lane visits in an epoch, in order.

    Args:
        bounds: int64 [groups + 1], the first place of each group in the row of the shards, in the order of the row.
        order: int64 [groups], which group comes when.
        ends: int64 [groups], samples of the lane up to the end of each group, in the order of the visits.
    """

    bounds: np.ndarray
    order: np.ndarray
    ends: np.ndarray


class Visits(NamedTuple):
    """The shards of a group, in the order in which a lane visits them in an epoch.

    A lane may own only a part of a shard, at the ends of its span.

    Args:
        start: samples of the lane in the epoch before the group.
        places: int64 [n], the place of each shard in the row.
        firsts: int64 [n], the index of the first sample of each shard that is the lane's.
        ends: int64 [n], samples of the group up to the end of each shard.
        begins: the same up to its beginning.
        block_shards: int64 [blocks + 1], shards before each block.
        block_ends: int64 [blocks], samples of the group up to the end of each block.
        block_begins: the same up to its beginning.
        block_keys: uint64 [blocks], which decide how the samples of each block are shuffled.
    """

    start: int
    places: np.ndarray
    firsts: np.ndarray
    ends: np.ndarray
    begins: np.ndarray
    block_shards: np.ndarray
    block_ends: np.ndarray
    block_begins: np.ndarray
    block_keys: np.ndarray


class LaneVisits:
    """Computes the visits of lanes, and keeps those that were asked for last.

    Args:
        row: the shards.
        block: shards that are shuffled together, at most.
        seed: decides the orders.
        shuffle: without it, groups, shards and samples keep the order of the row.
        kept: tables to keep.
    """

    def __init__(self, row: ShardRow, block: int, seed: int, shuffle: bool, kept: int) -> None:
        self.row = row
        self._block, self._seed, self._shuffle, self._kept = block, seed, shuffle, kept
        self._tables: OrderedDict[tuple[int, ...], Groups | Visits] = OrderedDict()

    def groups(self, epoch: int, lane: int, span: tuple[int, int]) -> Groups:
        """The groups of a lane that owns the samples `span` of the row."""
        return self._made((epoch, lane), lambda: self._groups(epoch, lane, span))

    def visits(self, epoch: int, lane: int, span: tuple[int, int], number: int) -> Visits:
        """The visits of the lane's number-th group of the epoch."""
        return self._made((epoch, lane, number), lambda: self._visits(epoch, lane, span, number))

    def _made(self, key: tuple[int, ...], make: Callable[[], _Table]) -> _Table:
        table = self._tables.get(key) or make()
        remember(self._tables, key, table, self._kept)
        return table  # type: ignore[return-value]

    def _groups(self, epoch: int, lane: int, span: tuple[int, int]) -> Groups:
        first = int(np.searchsorted(self.row.edges, span[0], side="right")) - 1
        count = int(np.searchsorted(self.row.edges, span[1], side="left")) - first
        groups = -(-count // _GROUP)
        bounds = first + _evenly(count, groups)
        order = self._order(groups, epoch, lane, _GROUPS)
        sizes = np.diff(np.clip(self.row.edges[bounds], *span))
        return Groups(bounds, order, np.cumsum(sizes[order]))

    def _visits(self, epoch: int, lane: int, span: tuple[int, int], number: int) -> Visits:
        groups = self.groups(epoch, lane, span)
        group = int(groups.order[number])
        low, high = int(groups.bounds[group]), int(groups.bounds[group + 1])
        edges = np.clip(self.row.edges[low : high + 1], *span)
        order = self._order(high - low, epoch, lane, _SHARDS, group)
        ends = np.cumsum(np.diff(edges)[order])
        places = low + order
        firsts = self.row.starts[self.row.shards[places]] + edges[order] - self.row.edges[places]
        blocks = -(-(high - low) // self._block)
        block_shards = _evenly(high - low, blocks)
        block_ends = ends[block_shards[1:] - 1]
        key = combine64(VISITS_VERSION, self._seed, epoch, lane, group)
        return Visits(
            int(groups.ends[number - 1]) if number else 0,
            places,
            firsts,
            ends,
            _before(ends),
            block_shards,
            block_ends,
            _before(block_ends),
            mix64_array(np.arange(blocks, dtype=np.uint64) + np.uint64(key)),
        )

    def _order(self, count: int, *what: int) -> np.ndarray:
        numbers = np.arange(count, dtype=np.int64)
        if not self._shuffle or count == 1:
            return numbers
        return permuted(count, combine64(VISITS_VERSION, self._seed, *what), 0, numbers)


def _evenly(count: int, parts: int) -> np.ndarray:
    """Bounds of parts of a row, which differ by at most one in size: int64 [parts + 1]."""
    return np.arange(parts + 1, dtype=np.int64) * count // parts


def _summed(lengths: np.ndarray) -> np.ndarray:
    sums = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=sums[1:])
    return sums


def _before(ends: np.ndarray) -> np.ndarray:
    begins = np.zeros_like(ends)
    begins[1:] = ends[:-1]
    return begins
