"""When a reader needs a shard: what orders tell and sources fetch ahead by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Callable, NamedTuple


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
