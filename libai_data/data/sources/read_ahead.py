"""Prefetches shards: several at once, in the order of their first use, up to a number of bytes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable

import numpy as np

from libai_data.data.fork_lock import ForkLock
from libai_data.data.shard_use import ShardUse
from libai_data.errors import DataPipelineError

logger = logging.getLogger(__name__)

_AT_ONCE = 8
_Held = list[tuple[ShardUse, "Future[Callable[[], None]]"]]


class ReadAhead:
    """Prefetches the shards that the next batches need, and keeps them in the cache.

    If a shard cannot be fetched, the log has a warning. A worker that reads the shard fetches it again, and raises.

    Args:
        uses: uses of the shards, in the order of their first batch.
        hold: fetches a shard, and returns a function that releases it.
        sizes: int64 [shards], bytes.
        budget: most bytes of shards that are held or being fetched; one shard is held even if it has more.
        done: called with a shard and the last batch of its last held use, before the shard is released.
    """

    def __init__(
        self,
        uses: Iterator[ShardUse],
        hold: Callable[[int], Callable[[], None]],
        sizes: np.ndarray,
        budget: int,
        done: Callable[[int, int], None],
    ) -> None:
        self._uses, self._hold, self._sizes, self._budget, self._done = uses, hold, sizes, budget, done
        self._held: _Held = []
        self._waiting: ShardUse | None = None
        self._first_end = -1  # the last batch of the use that ends first
        self._lock = ForkLock()
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="reads shards ahead")
        self._close = weakref.finalize(self, _release_all, self._held, self._pool)
        self.reached(0)

    def reached(self, batch: int) -> int:
        """Release the shards whose uses all end before this batch, and fetch more; returns the next batch to report."""
        if batch <= self._first_end:  # This needs no lock, because the number only grows.
            return self._first_end + 1
        with self._lock:
            if not self._close.alive:  # Another thread has closed this object.
                return batch
            # A shard that is still being fetched is released later. A shard with a later use stays.
            kept: _Held = []
            over: _Held = []
            for use, fetched in self._held:
                (over if use.last < batch and fetched.done() else kept).append((use, fetched))
            self._held[:] = kept
            shards = {use.shard: fetched for use, fetched in kept}
            for use, fetched in over:
                if use.shard not in shards:
                    self._done(use.shard, use.last)  # first, as a copy that is released may be removed at once
                    fetched.result()()
            taken = sum(int(self._sizes[shard]) for shard in shards)
            while len(self._held) < 2 * len(self._sizes):
                use = self._waiting or next(self._uses)
                self._waiting = None
                if use.last < batch:
                    continue
                more = 0 if use.shard in shards else int(self._sizes[use.shard])
                if taken and taken + more > self._budget:
                    self._waiting = use
                    break
                taken += more
                if use.shard not in shards:
                    shards[use.shard] = self._pool.submit(self._fetched, use.shard)
                self._held.append((use, shards[use.shard]))
            self._first_end = min((use.last for use, _ in self._held), default=batch)
            return self._first_end + 1

    def _fetched(self, shard: int) -> Callable[[], None]:
        try:
            return self._hold(shard)
        except (DataPipelineError, OSError) as error:
            logger.warning("A shard cannot be fetched ahead: %s", error)
            return lambda: None

    def bytes_held(self) -> int:
        """The bytes of shards that this object holds in the cache."""
        with self._lock:
            return sum(
                int(self._sizes[shard]) for shard in {use.shard for use, fetched in self._held if fetched.done()}
            )

    def close(self) -> None:
        """Release all shards, and stop fetching."""
        with self._lock:
            self._close()


def _release_all(held: _Held, pool: ThreadPoolExecutor) -> None:
    pool.shutdown(wait=False, cancel_futures=True)
    for _, fetched in held:
        fetched.add_done_callback(lambda done: None if done.cancelled() else done.result()())
    held.clear()
