"""When a reader needs a shard: what orders tell and sources fetch ahead by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import Callable, NamedTuple

import numpy as np


class ShardUse(NamedTuple):
    """A time in which a reader needs a shard.

    Args:
        shard: number of the shard.
        first: the first global batch that may have a sample of it.
        last: the last such batch.
    """

    shard: int
    first: int
    last: int


class ShardPlan(NamedTuple):
    """The shards that a reader needs from a batch on.

    Args:
        uses: in the order of their first batch, without end.
        next_use: shard and batch -> the first batch after that one that may need the shard.
    """

    uses: Iterator[ShardUse]
    next_use: Callable[[int, int], int]


def most_in_use(uses: Iterable[ShardUse], sizes: np.ndarray) -> int:
    """The most bytes of shards that are in use at once.

    Args:
        uses: in the order of their first batch.
        sizes: int64 [shards], bytes.
    """
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
