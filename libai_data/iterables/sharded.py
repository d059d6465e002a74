"""A stream in shards: read by as many processes or threads as asked for, and put together by one rule.

Row by row the shards take turns; one that has ended is left out from then on. So the stream depends on the number of
shards, and not on who reads them.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Any, Callable, NamedTuple

import cloudpickle
import numpy as np

from libai_data.data.items import fields_in
from libai_data.data.random.hashing import combine64
from libai_data.data.random.sample_random import become_worker_process
from libai_data.data.shard_work.process_pool import Work
from libai_data.errors import ConfigError, SchemaError, error_text
from libai_data.iterables.digest import running_digest
from libai_data.iterables.iterable_source import SaveState, Source
from libai_data.iterables.prefetcher import COMPARED_ITEMS, check_kept, field_digests
from libai_data.iterables.shard_lanes import ShardLanes
from libai_data.loader.worker import JOB_VARIABLES
from libai_data.loader.worker_info import WorkerInfo, get_worker_info, set_worker_info

_MOST_AT_ONCE = 64
_SECONDS_AT_ONCE = 0.02
_BYTES_AT_ONCE = 8 << 20

_one_answer = threading.Lock()
"""Held while this process answers `get_worker_info` for a shard."""


@dataclass(frozen=True)
class Sharding:
    """How a stream is read.

    Args:
        num_shards: that it is put together of; None for one, which is the whole.
        shuffle_buffer: samples that are kept to draw the next one of; 0 keeps the order.
        seed: of the draws.
        num_workers: who read the shards; 0 reads them in turn, in the thread that reads ahead.
        worker_type: "process" or "thread".
        worker_init_fn: called with the number of each shard before it is opened.
    """

    num_shards: int | None = None
    shuffle_buffer: int = 0
    seed: int = 0
    num_workers: int = 0
    worker_type: str = "process"
    worker_init_fn: Callable[[int], Any] | None = None

    @property
    def shards(self) -> int:
        """How many there are."""
        return self.num_shards or 1

    def words(self) -> dict[str, int] | None:
        """What decides the rows, which a state keeps; None if it is the source alone."""
        if self.shards == 1 and not self.shuffle_buffer:
            return None
        shuffling = {"shuffle_buffer": self.shuffle_buffer, "seed": self.seed} if self.shuffle_buffer else {}
        return {"num_shards": self.shards, **shuffling}


class Part(NamedTuple):
    """What is to be read next of a shard: the rows from `start` on, as many as take a moment."""

    epoch: int
    shard: int
    start: int


class ShardReader:
    """Reads parts of shards; each process has a copy, which keeps the shards open that it has begun.

    Args:
        pickled: the source, and what is called before a shard is opened.
        num_shards: of the stream.
        seed: told to who asks `get_worker_info`.
        is_process: whether a process of its own reads.
        asks: whether the source has to ask `get_worker_info` which shard it is to yield.
    """

    def __init__(self, pickled: bytes, num_shards: int, seed: int, is_process: bool, asks: bool) -> None:
        self._pickled, self._num_shards, self._seed = pickled, num_shards, seed
        self.is_process, self._asks = is_process, asks
        self._open: dict[int, tuple[Part, Iterator[Any], Any]] = {}

    def __call__(self, part: Part) -> tuple[list[Any], bool]:
        """The rows of a part, and whether the shard has ended."""
        expected, iterator, thing = self._open.pop(part.shard, (None, iter(()), None))
        if expected != part:
            thing, iterator = self._opened(part)
        items: list[Any] = []
        began, first, digests, size = perf_counter(), None, {}, 0
        ended = True
        with self._being(part.shard, thing):
            for item in iterator:
                if part.start == 0 and not items:
                    first, digests = item, field_digests(item)
                elif part.start == 0 and len(items) < COMPARED_ITEMS:
                    check_kept(first, digests, item)
                items.append(item)
                size += _bytes_of(item)
                if len(items) == _MOST_AT_ONCE or size > _BYTES_AT_ONCE or perf_counter() - began > _SECONDS_AT_ONCE:
                    ended = False
                    break
        if not ended:
            self._open[part.shard] = part._replace(start=part.start + len(items)), iterator, thing
        return items, ended

    def _opened(self, part: Part) -> tuple[Any, Iterator[Any]]:
        """Begin a shard anew, and pass over the rows before the part."""
        if self.is_process:
            become_worker_process()
            for name in JOB_VARIABLES:
                os.environ.pop(name, None)
        thing, init = pickle.loads(self._pickled)
        with self._being(part.shard, thing):
            if init is not None:
                init(part.shard)
            iterator, _ = Source(thing).open(part.epoch, part.shard, self._num_shards)
            for _ in islice(iterator, part.start):
                pass
        return thing, iterator

    @contextmanager
    def _being(self, shard: int, thing: Any) -> Iterator[None]:
        """Let whoever asks which worker this is, of this package or of PyTorch, hear the number of the shard."""
        if not (self._asks or self.is_process):
            yield
            return
        # A process has one answer, so of the threads that read for several loaders one reads at a time.
        with nullcontext() if self.is_process else _one_answer, self._answering(shard, thing):
            yield

    @contextmanager
    def _answering(self, shard: int, thing: Any) -> Iterator[None]:
        before = get_worker_info()
        set_worker_info(WorkerInfo(shard, self._num_shards, self._seed, thing))
        torchs = sys.modules.get("torch.utils.data._utils.worker")
        torchs_before = getattr(torchs, "_worker_info", None)
        if torchs is not None:
            seed = combine64(self._seed, shard) >> 1
            torchs._worker_info = torchs.WorkerInfo(  # type: ignore[attr-defined]
                id=shard, num_workers=self._num_shards, seed=seed, dataset=thing
            )
        try:
            yield
        finally:
            set_worker_info(before)
            if torchs is not None:
                torchs._worker_info = torchs_before  # type: ignore[attr-defined]


class ShardedSource(Source):
    """A source whose rounds are put together of shards, or shuffled, or both.

    Args:
        thing: see `Source`. If it takes `shard` and `num_shards`, it is called for each shard. Any other must ask
            `get_worker_info`, of this package or of PyTorch, which part of the samples to yield.
        batches: whether it yields batches.
        sharding: how it is read.

    Raises:
        ConfigError: It cannot be read so.
    """

    keeps_states = False

    def __init__(self, thing: Any, batches: bool | None, sharding: Sharding) -> None:
        super().__init__(thing, batches)
        self._sharding = sharding
        self._takes_shard, self.takes_shard = self.takes_shard, False
        self._lanes: ShardLanes | None = None
        self._reader: ShardReader | None = None
        if sharding.shuffle_buffer and self.batches:
            raise ConfigError(f"shuffle_buffer shuffles samples, but {self.name} yields batches; shuffle its samples")
        if self._takes_shard and sharding.num_shards is None:
            raise ConfigError(
                f"{self.name} takes shard and num_shards: say num_shards too, of which its stream is put together, "
                "or leave num_workers and shuffle_buffer out to call it for each data-parallel rank"
            )
        if sharding == Sharding(None, sharding.shuffle_buffer, sharding.seed):
            return
        by_threads = sharding.num_workers and sharding.worker_type == "thread"
        if by_threads and sharding.shards > 1 and not self._takes_shard:
            raise ConfigError(
                f"worker_type='thread': {self.name} has to ask which shard it is to yield, and gets one answer in a "
                "process. Pass a function that takes shard and num_shards, or use worker_type='process'"
            )
        try:
            pickled = cloudpickle.dumps((thing, sharding.worker_init_fn))
        except Exception as error:
            raise ConfigError(
                f"{self.name} cannot be sent to those that read its shards: {error_text(error)}. Pass a function that "
                "opens what cannot be pickled, or leave num_workers and num_shards out"
            ) from error
        is_process = bool(sharding.num_workers) and not by_threads
        self._reader = ShardReader(pickled, sharding.shards, sharding.seed, is_process, not self._takes_shard)

    def rounds_to_replay(self, epoch: int) -> int:
        """0 if shards are opened anew in each round."""
        return super().rounds_to_replay(epoch) if self._reader is None else 0

    def open(
        self, epoch: int, shard: int, num_shards: int, state: str | None = None
    ) -> tuple[Iterator[Any], SaveState | None]:
        """Begin a round; there is no state but the number of rows."""
        if self._reader is None:
            rows = super().open(epoch, 0, 1)[0]
        else:
            rows = self._interleaved(self._shards(self._reader, epoch))
        buffer = self._sharding.shuffle_buffer
        return (_shuffled(rows, buffer, combine64(self._sharding.seed, epoch)) if buffer else rows), None

    def _shards(self, reader: ShardReader, epoch: int) -> list[Iterator[Any]]:
        sharding = self._sharding
        if not sharding.num_workers:
            return [_read_in_turn(reader, epoch, shard) for shard in range(sharding.shards)]
        if self._lanes is None:
            name = self.name  # Not the source, which ends the processes when it is gone.
            work = Work(reader, lambda part: f"shard {part.shard} of {name}") if reader.is_process else None
            lanes = min(sharding.num_workers, sharding.shards)
            self._lanes = ShardLanes(work, reader, lanes, self.name)
        return self._lanes.begin(lambda shard, start: Part(epoch, shard, start), sharding.shards)

    def _interleaved(self, shards: list[Iterator[Any]]) -> Iterator[Any]:
        """A row of each shard in turn."""
        digests, counts = [""] * len(shards), [0] * len(shards)
        running = list(enumerate(shards))
        while running:
            for number, shard in list(running):
                try:
                    item = next(shard)
                except StopIteration:
                    running.remove((number, shard))
                    self._refuse_equal(digests, counts, number)
                    continue
                if counts[number] < COMPARED_ITEMS:
                    counts[number] += 1
                    digests[number] = running_digest(digests[number], item)
                    if counts[number] == COMPARED_ITEMS:
                        self._refuse_equal(digests, counts, number)
                yield item

    def _refuse_equal(self, digests: list[str], counts: list[int], number: int) -> None:
        """Refuse shards that begin with the same rows: an iterable that does not split itself yields all to each."""
        others = [other for other in range(number) if counts[other] == counts[number] and digests[other]]
        same = [other for other in others if digests[other] == digests[number]]
        if same and not self._takes_shard:
            raise SchemaError(
                f"shards {same[0]} and {number} of {self.name} begin with the same {counts[number]} sample(s): it does "
                "not split itself. Let it yield the samples of get_worker_info().id of get_worker_info().num_workers "
                "(of torch.utils.data or libai_data), or pass a function that takes shard and num_shards"
            )

    def close(self) -> None:
        """End those that read."""
        if self._lanes is not None:
            self._lanes.close()
            self._lanes = None


def _bytes_of(item: Any) -> int:
    """About how much memory an item takes, as far as its fields tell."""
    fields = fields_in(item)
    values = fields.values() if fields is not None else item if isinstance(item, (tuple, list)) else (item,)
    return sum(int(getattr(getattr(value, "tensor", value), "nbytes", 0)) for value in values)


def _read_in_turn(reader: ShardReader, epoch: int, shard: int) -> Iterator[Any]:
    start, ended = 0, False
    while not ended:
        items, ended = reader(Part(epoch, shard, start))
        start += len(items)
        yield from items


def _shuffled(rows: Iterator[Any], size: int, key: int) -> Iterator[Any]:
    """Each time one of the next `size` rows, drawn at random."""
    generator = np.random.Generator(np.random.Philox(key=key))
    kept = list(islice(rows, size))
    for row in rows:
        place = int(generator.integers(size))
        yield kept[place]
        kept[place] = row
    for place in generator.permutation(len(kept)).tolist():
        yield kept[place]
