"""When a reader needs a shard. Orders compute this, and sources prefetch shards by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from math import ceil
from typing import Callable, NamedTuple

import numpy as np

BESIDE_AHEAD = 2
"""Batches in use besides those that workers read ahead: the current one, and the next one that is asked for."""


class ShardUse(NamedTuple):
    """A range of global batches for which a reader needs a shard."""

    shard: int  # number of the shard
    first: int  # the first global batch that may have a sample of it
    last: int  # the last such batch


class ShardPlan(NamedTuple):
    """The shards that a reader needs from a batch on."""

    uses: Iterator[ShardUse]  # endless, in the order of their first batch
    next_use: Callable[[int, int], int]  # shard and batch -> the first later batch that may need it


def most_in_use(uses: Iterable[ShardUse], sizes: np.ndarray) -> int:
    """The most bytes of shards in use at once; `uses` by their first batch, `sizes` int64 [shards], bytes."""
    ends: list[tuple[int, int]] = []
    counts: Counter[int] = Counter()
    now = most = 0
    for use in uses:
        while ends and ends[0][0] < use.first:
            _, shard = heappop(ends)
            counts[shard] -= 1
            now -= 0 if counts[shard] else int(sizes[shard])
        now += 0 if counts[use.shard] else int(sizes[use.shard])
        counts[use.shard] += 1
        heappush(ends, (use.last, use.shard))
        most = max(most, now)
    return most


def most_of_turns(turns: int, block: int, lengths: np.ndarray, sizes: np.ndarray) -> int:
    """The most bytes of shards that so many consecutive samples can need, for any order of the shards. The samples may
    use only parts of the first and the last block; they use all samples of the shards between.

    Args:
        block: most shards that are shuffled together.
        lengths, sizes: samples and bytes of each shard, int64 [shards].
    """
    between = int(np.searchsorted(np.cumsum(np.sort(lengths)), turns - 2, side="right"))
    count = min(2 * block + between if turns > 1 else block, len(sizes))
    return int(np.sort(sizes)[len(sizes) - count :].sum())


def share_of_node(ranks: int, data_parallel_size: int, parts: float) -> float:
    """The fraction of a node's cache for one reader, which reads the rows of so many data-parallel ranks; `parts` is
    `ParallelMesh.parts_of_data`, of which a node reads one."""
    return min(1.0, ranks / data_parallel_size * parts)


def cache_for(needed: int, share: float) -> int:
    """The bytes of a cache of which a reader may use a `share`, enough for `needed` bytes of shards at once."""
    return ceil((2 * needed + 1) / share)


def bytes_a_batch(uses: Iterable[ShardUse], sizes: np.ndarray, room: int) -> float:
    """The bytes that must be fetched in the time of each batch at least, so that only the first batch waits; infinite
    if `room`, the most bytes of shards that are kept, is too small for the shards that are in use at once.

    A shard is fetched as soon as there is room for it, and kept until its room is needed. `uses` are in the order of
    their first batch, `sizes` int64 [shards], bytes.
    """
    ends: list[tuple[int, int]] = []
    counts: Counter[int] = Counter()
    held, begins, begun = 0, 0, None
    rows = []
    for use in uses:
        begun = use.first if begun is None else begun
        size = 0 if use.shard in counts else int(sizes[use.shard])
        while ends and held + size > room:
            last, shard = heappop(ends)
            counts[shard] -= 1
            if not counts[shard]:
                del counts[shard]
                held -= int(sizes[shard])
                begins = max(begins, last + 1 - begun)
        held += size
        counts[use.shard] += 1
        heappush(ends, (use.last, use.shard))
        if size and use.first > begun:
            rows.append((begins, size, use.first - begun))
    if not rows:
        return 0.0
    begin, size, needed = np.array(rows, dtype=np.float64).T
    if (begin >= needed).any():
        return float("inf")
    before = np.cumsum(size) - size
    low, high = 0.0, float(size.sum() / (needed - begin).min())
    while high - low > 0.001 * high:
        rate = (low + high) / 2
        done = np.maximum.accumulate(begin - before / rate) + (before + size) / rate
        low, high = (low, rate) if (done <= needed).all() else (rate, high)
    return high
