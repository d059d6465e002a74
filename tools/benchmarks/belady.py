"""The offline minimum: how often a cache must fetch shards, by Belady's rule."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np


def least_fetched(batches: Sequence[AbstractSet[int]], sizes: np.ndarray, room: int, steps: int) -> int:
    """How often shards are fetched if the cache removes the shard whose next use is farthest away.

    This is the minimum for shards of equal size (Belady, 1966).

    Args:
        batches: the shards that each batch needs, one batch after the other.
        sizes: of the shards, in the unit of `room`.
        room: of the cache; the shards of a batch are held even if they need more.
        steps: the batches that are read; later ones only say what is needed again.
    """
    uses: dict[int, list[int]] = {}  # shard -> batches that need it, the next one last
    for step in reversed(range(len(batches))):
        for shard in batches[step]:
            uses.setdefault(shard, []).append(step)
    held: set[int] = set()
    fetched = 0
    for needed in batches[:steps]:
        for shard in needed:
            uses[shard].pop()
        fetched += len(needed - held)
        held |= needed
        while sizes[list(held)].sum() > room and held - needed:
            held.remove(max(held - needed, key=lambda shard: uses[shard][-1] if uses[shard] else len(batches)))
    return fetched
