"""Finds the streamed shards of a dataset's samples, also in nested datasets, and prefetches these shards."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Callable

import numpy as np

from libai_data.data.attributes import attribute_of
from libai_data.data.datasets.combine import ConcatDataset, RandomPart, Subset
from libai_data.data.datasets.mapped import Map
from libai_data.data.datasets.one_round import OneRound
from libai_data.data.datasets.stream_transform import StreamTransform
from libai_data.data.shard_use import ShardPlan, ShardUse, cache_for, most_in_use, most_of_turns
from libai_data.data.sources.fetch_log import FetchLog
from libai_data.data.sources.last_used import LastUsed
from libai_data.data.sources.read_ahead import ReadAhead
from libai_data.data.sources.streamed import StreamedSource
from libai_data.errors import ConfigError

Locate = Callable[[np.ndarray], np.ndarray]

_NOT_STREAMED = -1
_NS_PER_BATCH = 1000
"""Step of the times that set the copies' priorities; only the order of the times matters."""
_HOUR = 3600 * 10**9


class StreamedShards:
    """The shards of all streamed sources within a dataset, numbered consecutively over all sources.

    The dataset is a streamed source, or has one as `source`, whose records are its samples, or to whose shards its
    `shard_lengths` belong. Or it is a `Map`, `Subset`, `RandomPart`, `ConcatDataset`, blend, filter or packer of such.

    Attributes:
        sources: the streamed sources, each once.
        sizes: int64 [shards], bytes.
        none: shard number for samples that are in no streamed shard. Plans contain this number, so that a search for
            the next use ends even if no sample is streamed.
        is_shuffled: whether the dataset has parts in a random order.
    """

    def __init__(self, dataset: Any) -> None:
        self._firsts: dict[StreamedSource, int] = {}
        self.is_shuffled = False
        self._locate = self._locator(dataset)
        self.sources = list(self._firsts)
        self.sizes = np.concatenate([np.empty(0, np.int64), *(source.table.sizes for source in self.sources)])
        self.none = len(self.sizes)
        self._share, self._budget = 1.0, 0
        self._ahead: ReadAhead | None = None
        self._log: FetchLog | None = None
        self._counting = threading.Lock()

    def at(self, indices: np.ndarray) -> np.ndarray:
        """The shards of the samples with these indices, int64 [n]."""
        found = self._locate(np.asarray(indices, dtype=np.int64))
        return np.where(found == _NOT_STREAMED, self.none, found)

    def _locator(self, dataset: Any) -> Locate:
        if isinstance(dataset, (Map, StreamTransform)):
            return self._locator(dataset.dataset)
        if isinstance(dataset, (Subset, RandomPart)):
            whole, part = self._locator(dataset.dataset), dataset
            self.is_shuffled |= isinstance(part, RandomPart)
            return lambda indices: whole(part.indices(indices))
        if isinstance(dataset, OneRound):
            inputs, outputs = self._locator(dataset.dataset), dataset
            return lambda indices: inputs(outputs.first_inputs(indices))
        if isinstance(dataset, ConcatDataset):
            return self._joined(dataset)
        source = attribute_of(dataset, "source", dataset)
        if isinstance(source, StreamedSource):
            lengths = np.asarray(attribute_of(dataset, "shard_lengths", source.shard_lengths))
            if len(lengths) == len(source.shard_lengths) and lengths.sum() == len(dataset):
                first = self._firsts.setdefault(source, sum(len(other.table) for other in self._firsts))
                ends = np.cumsum(lengths)
                return lambda indices: first + np.searchsorted(ends, indices, side="right")
        return lambda indices: np.full(len(indices), _NOT_STREAMED)

    def _joined(self, dataset: ConcatDataset) -> Locate:
        members = [self._locator(each) for each in dataset.datasets]

        def locate(indices: np.ndarray) -> np.ndarray:
            numbers, own = dataset.locate_all(indices)
            found = np.empty(len(indices), np.int64)
            for number in np.unique(numbers).tolist():
                rows = numbers == number
                found[rows] = members[number](own[rows])
            return found

        return locate

    def use_share(self, share: float, is_kept: bool) -> None:
        """Set the fraction of the node's cache that this process, and each of its workers, may use for open copies. If
        it is the same as before, open shards stay open, unless `is_kept` is False: workers that are forked now would
        keep them open too."""
        self._share = share
        self._budget = int(min(source.storage.size for source in self.sources) * share) // 2
        opened = self.sources[0].opened
        if not is_kept or opened.limit != self._budget or any(source.opened is not opened for source in self.sources):
            opened = LastUsed(self._budget)
        for source in self.sources:
            source.opened = opened

    def plan_of(self, lane_plan: ShardPlan, lengths: np.ndarray) -> ShardPlan:
        """Convert the plan of an order with lanes, which numbers all shards of the dataset, to this object's numbers;
        with `shard_lengths_of` the dataset, int64 [shards]."""
        streamed = self._streamed(lengths)
        own = np.zeros(self.none + 1, np.int64)
        full = np.flatnonzero(lengths)
        own[streamed[full]] = full
        uses = (use._replace(shard=int(streamed[use.shard])) for use in lane_plan.uses)
        return ShardPlan(uses, lambda shard, batch: lane_plan.next_use(int(own[shard]), batch))

    def _streamed(self, lengths: np.ndarray) -> np.ndarray:
        return self.at(np.minimum(np.cumsum(lengths) - lengths, lengths.sum() - 1))

    def sizes_of(self, lengths: np.ndarray) -> np.ndarray:
        """The bytes of all shards of the dataset, int64 [shards]; 0 for shards that are not streamed."""
        return np.append(self.sizes, 0)[self._streamed(lengths)]

    def most_in_order(self, samples: int, orders: int) -> int:
        """The most bytes of shards that are needed at once, if so many samples are read in the order of their indices;
        in `orders` such orders, one for each dataset of a blend."""
        lengths = np.concatenate([np.empty(0, np.int64), *(source.shard_lengths for source in self.sources)])
        return orders * most_of_turns(samples, 1, lengths, self.sizes)

    def uses_in(self, samples: Iterable[tuple[np.ndarray, np.ndarray]]) -> Iterator[ShardUse]:
        """The uses of shards, in the order of their first batch. `samples` are the batch (ascending) and the index of
        each sample, int64 [n] each, for several batches at a time."""
        for batches, indices in samples:
            shards = self.at(indices)
            found, firsts = np.unique(shards, return_index=True)
            lasts = len(shards) - 1 - np.unique(shards[::-1], return_index=True)[1]
            for row in np.argsort(firsts, kind="stable").tolist():
                yield ShardUse(int(found[row]), int(batches[firsts[row]]), int(batches[lasts[row]]))

    def read_ahead(self, plan: ShardPlan, most_bytes: Callable[[], int]) -> None:
        """Prefetch shards in the order of the plan of this process. A ConfigError if its share of the cache is smaller
        than the shards that it needs at once; `most_bytes` returns the most that any process with an equal part may
        need."""
        self.end_read_ahead()
        sizes = np.append(self.sizes, 0)
        first = _first_uses(plan.uses)
        # A later batch may need the largest shard.
        needed = max(most_in_use(first, sizes), int(sizes.max()))
        if needed > self._budget:
            self._refuse(needed, max(needed, most_bytes()), "use fewer lanes, smaller blocks or smaller shards")
        hour = (time.time_ns() // _HOUR + 1) * _HOUR

        def done(shard: int, batch: int) -> None:
            if shard == self.none:
                return
            source, own = self._own(shard)
            source.expect(own, hour - _NS_PER_BATCH * plan.next_use(shard, batch))

        begin = {use.shard: int(sizes[use.shard]) for use in first if use.first == first[0].first}
        begin.pop(self.none, None)
        self._log = log = FetchLog(self.name, begin, self._bytes_ahead)
        for each in self.sources:
            each.fetched.clear()

        def hold(shard: int) -> Callable[[], None]:
            if shard == self.none:
                return lambda: None
            source, own = self._own(shard)
            copy = source.hold(own)
            with self._counting:
                # A read of the shard may have fetched it before the prefetch did.
                log.arrived(shard, int(self.sizes[shard]), own in source.fetched)
                source.fetched.discard(own)
            return copy.close

        self._ahead = ReadAhead(chain(first, plan.uses), hold, sizes, self._budget, done)

    def _own(self, shard: int) -> tuple[StreamedSource, int]:
        """The source of a shard, and the shard's number in the source."""
        source, first = next(item for item in reversed(self._firsts.items()) if item[1] <= shard)
        return source, shard - first

    def check_holds_all(self) -> None:
        """Raise a ConfigError if this process's share of the cache has no room for all shards, which an order needs at
        once."""
        needed = int(self.sizes.sum())
        if needed > self._budget:
            self._refuse(
                needed,
                needed,
                "give lanes (lanes=64), which keep samples of one shard close together. Random parts have no lanes: "
                "read these with shuffle=False",
            )

    def _refuse(self, needed: int, enough: int, advice: str) -> None:
        storage = self.sources[0].storage
        raise ConfigError(
            f"the cache {storage.directory} of {storage.size} bytes is too small to stream {self.name}: "
            f"the order needs shards of {needed} bytes at once, and this process may keep {self._budget}; set "
            f"LIBAI_DATA_CACHE_SIZE to at least {cache_for(enough, self._share)} bytes, or {advice}"
        )

    @property
    def name(self) -> str:
        """The folders of the sources, for messages."""
        return ", ".join(source.folder for source in self.sources)

    def reached(self, batch: int) -> int:
        """Release the prefetched shards whose uses all end before this batch; returns the next batch to report."""
        ahead = self._ahead  # Another thread may end the prefetch.
        return batch if ahead is None else ahead.reached(batch)

    def end_read_ahead(self) -> None:
        """Stop the prefetch, and release its shards."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        if self._log is not None:
            self._log.close()

    def close_open_shards(self) -> None:
        """Close the shards that this process has open, so that other loaders have room in the cache."""
        for source in self.sources:
            source.opened.clear()

    def stats(self) -> dict[str, Any]:
        """The prefetch statistics of the newest pass, see `FetchLog.stats`; {} if nothing was prefetched."""
        if self._log is None:
            return {}
        with self._counting:
            return self._log.stats(
                int(source.table.sizes[shard]) for source in self.sources for shard in tuple(source.fetched)
            )

    def _bytes_ahead(self) -> int:
        ahead = self._ahead
        return 0 if ahead is None else ahead.bytes_held()


def _first_uses(uses: Iterator[ShardUse]) -> list[ShardUse]:
    """The uses up to the end of those that begin with the first batch."""
    taken: list[ShardUse] = []
    end = 0
    for use in uses:
        taken.append(use)
        if use.first == taken[0].first:
            end = max(end, use.last)
        if use.first > end:
            break
    return taken
