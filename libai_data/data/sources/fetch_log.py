"""Counts prefetched shards, and shows progress: a bar until the first batch has its shards, then lines in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any, Callable

from libai_data.data.progress_bar import progress_bar
from libai_data.errors import bytes_in_words

logger = logging.getLogger(__name__)

_SECONDS_UNTIL_BAR, _SECONDS_BETWEEN_LINES = 1.0, 60.0


class FetchLog:
    """The progress of the prefetch for a pass. Only one thread at a time may call the methods.

    Args:
        first: number -> bytes, for each shard that the first batch needs.
        bytes_ahead: returns the bytes of shards that are in the cache for the next batches.
    """

    def __init__(self, name: str, first: Mapping[int, int], bytes_ahead: Callable[[], int] = lambda: 0) -> None:
        self._bytes_ahead = bytes_ahead
        self._name, self._waiting, self._total = name, dict(first), sum(first.values())
        self._begin = time.monotonic()
        self._next_line = self._begin + _SECONDS_BETWEEN_LINES
        self._fetched = self._bytes = self._cached = 0
        what = f"Fetching the first shard files of {name}"
        # If the output is no terminal, there is no bar, only the log line of `_end_beginning`.
        self._bar = progress_bar(
            desc=what, total=self._total, unit="B", unit_scale=True, disable=None, delay=_SECONDS_UNTIL_BAR
        )

    def arrived(self, shard: int, size: int, was_fetched: bool) -> None:
        """Count a shard that is in the cache now."""
        self._fetched += was_fetched
        self._bytes += size * was_fetched
        self._cached += not was_fetched
        if self._waiting:
            self._bar.update(self._waiting.pop(shard, 0))
            if not self._waiting:
                self._end_beginning()
        if time.monotonic() > self._next_line:
            self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
            logger.info("Streaming %s: %s.", self._name, in_words(self.stats()))

    def _end_beginning(self) -> None:
        self._bar.close()
        if self._fetched:
            words = self._name, bytes_in_words(self._total), time.monotonic() - self._begin
            logger.info("The first shard files of %s, %s, were fetched after %.1f s.", *words)

    def stats(self, also_fetched: Iterable[int] = ()) -> dict[str, Any]:
        """Shards and bytes fetched, bytes per second since the pass began, shards that the cache had, bytes ahead; with
        the bytes of each shard that was fetched, but for which `arrived` was not called yet."""
        more = [*also_fetched]
        size = self._bytes + sum(more)
        return {
            "fetched_shards": self._fetched + len(more),
            "fetched_bytes": size,
            "fetched_bytes_per_second": size / max(time.monotonic() - self._begin, 1e-9),
            "cached_shards": self._cached,
            "bytes_ahead": self._bytes_ahead(),
        }

    def close(self) -> None:
        """Remove the progress bar."""
        self._bar.close()


def in_words(stats: Mapping[str, Any]) -> str:
    """Fetch rate, cache hits and bytes ahead in words, from the `stats` of a loader; "" if it does not stream."""
    if "fetched_shards" not in stats:
        return ""
    rate, ahead = (bytes_in_words(stats[name]) for name in ("fetched_bytes_per_second", "bytes_ahead"))
    return (
        f"{stats['fetched_shards']} shard files fetched ({rate}/s), {stats['cached_shards']} were in the cache, "
        f"{ahead} ahead"
    )
