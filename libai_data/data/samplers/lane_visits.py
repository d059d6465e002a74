"""The visits of a lane: which shards the lane reads in an epoch, and the order of the shards and of their samples.

The shards of a lane are cut into groups of at most 256 neighbours. Each epoch permutes the groups, and the shards of
each group. So two short tables are sufficient to find a place in the epoch, for any number of shards.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

import numpy as np

from libai_data.data.datasets.stream_transform import remember
from libai_data.data.random.hashing import combine64, combine64_each, mix64_array
from libai_data.data.random.permutation import whole_permutation, whole_permutations

VISITS_VERSION = 1
"""Increased whenever the same (shard lengths, lanes, block, seed, epoch, place) would give another sample."""

_GROUP = 256
_ROW, _GROUPS, _SHARDS = range(3)


class ShardRow(NamedTuple):
    """All shards that have samples in one row, which the lanes cut into spans."""

    starts: np.ndarray  # int64 [shards + 1], the index of each shard's first sample in the dataset
    shards: np.ndarray  # int64 [n], the numbers of the shards in the order of the row
    edges: np.ndarray  # int64 [n + 1], samples before each place of the row

    @classmethod
    def of(cls, lengths: np.ndarray, seed: int, shuffle: bool) -> ShardRow:
        """The row of shards of these lengths; with `shuffle` in a random order that the seed decides."""
        shards = np.flatnonzero(lengths)
        if shuffle:
            shards = shards[whole_permutation(len(shards), combine64(VISITS_VERSION, seed, _ROW), 0)]
        return cls(_summed(lengths), shards, _summed(lengths[shards]))


class Groups(NamedTuple):
    """The groups that a lane visits in an epoch."""

    bounds: np.ndarray  # int64 [groups + 1], where groups begin in the row of the shards, in the order of the row
    order: np.ndarray  # int64 [groups], the numbers of the groups in the order of the visits
    edges: np.ndarray  # int64 [groups + 1], samples of the lane before each group, in the order of the visits


class Visits(NamedTuple):
    """The shards of a group, in the order in which a lane visits them in an epoch.

    A lane may own only a part of a shard, at the ends of its span.
    """

    start: int  # samples of the lane in the epoch before the group
    places: np.ndarray  # int64 [n], the place of each shard in the row
    firsts: np.ndarray  # int64 [n], the index of the lane's first sample in each shard
    edges: np.ndarray  # int64 [n + 1], samples of the group before each shard
    block_shards: np.ndarray  # int64 [blocks + 1], shards before each block
    block_edges: np.ndarray  # int64 [blocks + 1], samples of the group before each block
    block_keys: np.ndarray  # uint64 [blocks], decide how the samples of each block are shuffled


class LaneVisits:
    """Computes the visits of lanes, and caches the last used tables, `kept` of them.

    At most `block` shards are shuffled together. Without `shuffle`, groups, shards and samples keep the order of the
    row.
    """

    def __init__(self, row: ShardRow, block: int, seed: int, shuffle: bool, kept: int) -> None:
        self.row = row
        self._block, self._seed, self._shuffle, self._kept = block, seed, shuffle, kept
        self._tables: OrderedDict[tuple[int, ...], Groups | Visits] = OrderedDict()

    def groups(self, epoch: int, lane: int, span: tuple[int, int]) -> Groups:
        """The groups of a lane that owns the samples `span` of the row."""
        return self.groups_of(np.array([epoch]), np.array([lane]), np.array([span]))[0]

    def visits(self, epoch: int, lane: int, span: tuple[int, int], number: int) -> Visits:
        """The visits of the lane's number-th group of the epoch."""
        return self.visits_of(np.array([epoch]), np.array([lane]), np.array([span]), np.array([number]))[0]

    def groups_of(self, epochs: np.ndarray, lanes: np.ndarray, spans: np.ndarray) -> list[Groups]:
        """The groups of several lanes at once: epochs and lanes int64 [n], spans int64 [n, 2]."""
        return self._made((epochs, lanes), lambda rows: self._groups(epochs[rows], lanes[rows], spans[rows]))

    def visits_of(self, epochs: np.ndarray, lanes: np.ndarray, spans: np.ndarray, numbers: np.ndarray) -> list[Visits]:
        """The visits of the numbers-th groups of several lanes at once: numbers int64 [n], others as in `groups_of`."""
        return self._made(
            (epochs, lanes, numbers),
            lambda rows: self._visits(epochs[rows], lanes[rows], spans[rows], numbers[rows]),
        )

    def _made(self, keys: tuple[np.ndarray, ...], make: Callable[[list[int]], Iterator[Any]]) -> list[Any]:
        """The tables of these keys. One call makes all missing tables, as a numpy call costs more than its work."""
        names = list(zip(*(key.tolist() for key in keys)))
        found = [self._tables.get(name) for name in names]
        missing = [row for row, table in enumerate(found) if table is None]
        for row, table in zip(missing, make(missing) if missing else ()):
            found[row] = table
        for name, table in zip(names, found):
            remember(self._tables, name, table, self._kept)
        return found

    def _groups(self, epochs: np.ndarray, lanes: np.ndarray, spans: np.ndarray) -> Iterator[Groups]:
        firsts = np.searchsorted(self.row.edges, spans[:, 0], side="right") - 1
        shards = np.searchsorted(self.row.edges, spans[:, 1], side="left") - firsts
        counts = -(-shards // _GROUP)
        bounds = firsts[:, None] + _evenly(shards, counts)
        order = self._order(counts, epochs, lanes, np.array([_GROUPS]))
        sizes = np.diff(np.clip(self.row.edges[bounds], spans[:, :1], spans[:, 1:]))
        edges = _summed(np.take_along_axis(sizes, order, axis=1))
        for row, count in enumerate(counts.tolist()):
            yield Groups(bounds[row, : count + 1].copy(), order[row, :count].copy(), edges[row, : count + 1].copy())

    def _visits(
        self, epochs: np.ndarray, lanes: np.ndarray, spans: np.ndarray, numbers: np.ndarray
    ) -> Iterator[Visits]:
        tables = self.groups_of(epochs, lanes, spans)
        starts, groups = np.array(
            [(table.edges[number], table.order[number]) for table, number in zip(tables, numbers)]
        ).T
        lows, highs = np.array([table.bounds[group : group + 2] for table, group in zip(tables, groups.tolist())]).T
        counts = highs - lows
        places = np.minimum(lows[:, None] + np.arange(int(counts.max()) + 1), highs[:, None])
        cuts = np.clip(self.row.edges[places], spans[:, :1], spans[:, 1:])
        order = self._order(counts, epochs, lanes, np.array([_SHARDS]), groups)
        edges = _summed(np.take_along_axis(np.diff(cuts), order, axis=1))
        places = np.minimum(lows[:, None] + order, highs[:, None] - 1)
        firsts = self.row.starts[self.row.shards[places]] + np.take_along_axis(cuts, order, axis=1)
        firsts -= self.row.edges[places]
        blocks = -(-counts // self._block)
        block_shards = _evenly(counts, blocks)
        block_edges = np.take_along_axis(edges, block_shards, axis=1)
        keys = combine64_each((VISITS_VERSION, self._seed), epochs, lanes, groups)
        block_keys = mix64_array(np.arange(int(blocks.max()), dtype=np.uint64) + keys[:, None])
        for row, (start, count, block) in enumerate(zip(starts.tolist(), counts.tolist(), blocks.tolist())):
            yield Visits(
                start,
                places[row, :count].copy(),
                firsts[row, :count].copy(),
                edges[row, : count + 1].copy(),
                block_shards[row, : block + 1].copy(),
                block_edges[row, : block + 1].copy(),
                block_keys[row, :block].copy(),
            )

    def _order(self, counts: np.ndarray, *what: np.ndarray) -> np.ndarray:
        """A permutation of 0, 1, ... for each count, int64 [n, greatest count]."""
        if not self._shuffle:
            return np.broadcast_to(np.arange(int(counts.max())), (len(counts), int(counts.max())))
        return whole_permutations(counts, combine64_each((VISITS_VERSION, self._seed), *what))


def _evenly(counts: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Bounds of the parts of each row, whose sizes differ by at most one: int64 [n, greatest number of parts + 1]."""
    numbers = np.minimum(np.arange(int(parts.max()) + 1), parts[:, None])
    return numbers * counts[:, None] // parts[:, None]


def _summed(lengths: np.ndarray) -> np.ndarray:
    """The sum of the lengths before each one in its row, and at the end of the row the sum of all."""
    sums = np.zeros((*lengths.shape[:-1], lengths.shape[-1] + 1), dtype=np.int64)
    np.cumsum(lengths, axis=-1, out=sums[..., 1:])
    return sums
