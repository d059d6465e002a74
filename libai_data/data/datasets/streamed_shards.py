"""The streamed shards that samples of a dataset lie in, wherever its sources are, and how they are fetched ahead."""

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
"""Of the times by which copies are kept: the order counts, so that any unit does."""
_HOUR = 3600 * 10**9


class StreamedShards:
    """The shards of all streamed sources within a dataset, under numbers that go on from source to source.

    Args:
        dataset: a streamed source, or a dataset that has one as `source` and whose samples are its records, or whose
            `shard_lengths` belong to its shards. Or what is made of such datasets: a `Map`, `Subset`, `RandomPart`,
            `ConcatDataset`, blend, filter or packer.

    Attributes:
        sources: each once.
        sizes: int64 [shards], bytes.
        none: the number that samples have for a shard that are in none; it takes part in plans, so that they come to
            an end if no sample is streamed.
        is_shuffled: the dataset has parts in a random order.
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
        """The shards of samples by the samples' indices, int64 [n]."""
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
        """Set what part of the cache this process, and each of its workers, keeps copies open in.

        Args:
            share: of the samples that processes of this node read, those of this process.
            is_kept: shards that are open stay so, if the part is the same. Not if workers are forked now, which would
                hold them too.
        """
        self._share = share
        self._budget = int(min(source.storage.size for source in self.sources) * share) // 2
        opened = self.sources[0].opened
        if not is_kept or opened.limit != self._budget or any(source.opened is not opened for source in self.sources):
            opened = LastUsed(self._budget)
        for source in self.sources:
            source.opened = opened

    def plan_of(self, lane_plan: ShardPlan, lengths: np.ndarray) -> ShardPlan:
        """The plan of an order with lanes, which counts all shards of the dataset, for the streamed ones.

        Args:
            lane_plan: of the order.
            lengths: `shard_lengths_of` the dataset, int64 [shards].
        """
        streamed = self._streamed(lengths)
        own = np.zeros(self.none + 1, np.int64)
        full = np.flatnonzero(lengths)
        own[streamed[full]] = full
        uses = (use._replace(shard=int(streamed[use.shard])) for use in lane_plan.uses)
        return ShardPlan(uses, lambda shard, batch: lane_plan.next_use(int(own[shard]), batch))

    def _streamed(self, lengths: np.ndarray) -> np.ndarray:
        return self.at(np.minimum(np.cumsum(lengths) - lengths, lengths.sum() - 1))

    def sizes_of(self, lengths: np.ndarray) -> np.ndarray:
        """The bytes of all shards of the dataset, 0 of those that are not streamed, int64 [shards]."""
        return np.append(self.sizes, 0)[self._streamed(lengths)]

    def most_in_order(self, samples: int, orders: int) -> int:
        """The most bytes of shards at once, if they are read from first to last sample.

        Args:
            samples: that are read at once.
            orders: datasets of a blend, which are read so side by side.
        """
        lengths = np.concatenate([np.empty(0, np.int64), *(source.shard_lengths for source in self.sources)])
        return orders * most_of_turns(samples, 1, lengths, self.sizes)

    def uses_in(self, samples: Iterable[tuple[np.ndarray, np.ndarray]]) -> Iterator[ShardUse]:
        """The uses of shards, in the order of their first batch.

        Args:
            samples: some batches after the other: for each sample its batch and its index, int64 [n] each, ascending
                by batch.
        """
        for batches, indices in samples:
            shards = self.at(indices)
            found, firsts = np.unique(shards, return_index=True)
            lasts = len(shards) - 1 - np.unique(shards[::-1], return_index=True)[1]
            for row in np.argsort(firsts, kind="stable").tolist():
                yield ShardUse(int(found[row]), int(batches[firsts[row]]), int(batches[lasts[row]]))

    def read_ahead(self, plan: ShardPlan, most_bytes: Callable[[], int]) -> None:
        """Fetch shards before they are needed, in the order of a plan.

        Args:
            plan: of this process.
            most_bytes: gives what this process, and any other that reads an equal part, may need at once.

        Raises:
            ConfigError: The cache is smaller than the shards that are needed at once.
        """
        self.end_read_ahead()
        sizes = np.append(self.sizes, 0)
        first = _first_uses(plan.uses)
        # A later batch may need the largest shard, and any other one is still open then.
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
                # A batch that needs the shard may have fetched it first.
                log.arrived(shard, int(self.sizes[shard]), own in source.fetched)
                source.fetched.discard(own)
            return copy.close

        self._ahead = ReadAhead(chain(first, plan.uses), hold, sizes, self._budget, done)

    def _own(self, shard: int) -> tuple[StreamedSource, int]:
        """The source of a shard, and the shard's number there."""
        source, first = next(item for item in reversed(self._firsts.items()) if item[1] <= shard)
        return source, shard - first

    def check_holds_all(self) -> None:
        """Refuse an order that needs all shards at once, if the cache does not hold them.

        Raises:
            ConfigError: It does not.
        """
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
        """The folders of the sources."""
        return ", ".join(source.folder for source in self.sources)

    def reached(self, batch: int) -> None:
        """Let go of the shards that no batch from this one on needs."""
        if self._ahead is not None:
            self._ahead.reached(batch)

    def end_read_ahead(self) -> None:
        """Fetch no more ahead."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        if self._log is not None:
            self._log.close()

    def let_go(self) -> None:
        """Let go of the shards that this process has open, so that other loaders find room in the cache."""
        for source in self.sources:
            source.opened.clear()

    def stats(self) -> dict[str, Any]:
        """What was fetched ahead of the newest pass, and the bytes that are held for its next batches."""
        if self._log is None:
            return {}
        with self._counting:
            return self._log.stats(
                int(source.table.sizes[shard]) for source in self.sources for shard in tuple(source.fetched)
            )

    def _bytes_ahead(self) -> int:
        return 0 if self._ahead is None else self._ahead.bytes_held()


def _first_uses(uses: Iterator[ShardUse]) -> list[ShardUse]:
    """The uses until those that come first are over."""
    taken: list[ShardUse] = []
    end = 0
    for use in uses:
        taken.append(use)
        if use.first == taken[0].first:
            end = max(end, use.last)
        if use.first > end:
            break
    return taken
