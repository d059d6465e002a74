"""A stream in shards, read by processes or threads.

The stream has one row of each shard in turn, and skips a shard that has ended. So the stream depends on the number of
shards, and not on the processes that read them.
"""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, Callable, NamedTuple

from libai_data.data.items import ReuseCheck, fields_in
from libai_data.data.random.generator_states import watched
from libai_data.data.random.hashing import combine64
from libai_data.data.random.kept_objects import random_hashes_of, warn_of_random_hashes
from libai_data.data.random.sample_random import become_worker_process
from libai_data.data.shard_work.process_pool import Work
from libai_data.errors import ConfigError, SchemaError, error_text
from libai_data.iterables.interleaved import (
    Interleaved,
    ShardPart,
    ShardPlace,
    open_at,
    open_round,
    part_read,
    places_in,
)
from libai_data.iterables.kinds import yields_batches
from libai_data.iterables.packed_stream import WrappedSource, source_of
from libai_data.iterables.plain_state import saved_in
from libai_data.iterables.prefetcher import warn_of_draws
from libai_data.iterables.shard_lanes import ShardLanes
from libai_data.iterables.shared_use import Alone, Opened, SaveState
from libai_data.iterables.shuffle_buffer import ShuffleBuffer
from libai_data.loader.same_dataset import are_same, attributes_of
from libai_data.loader.worker import forget_job
from libai_data.loader.worker_info import WorkerInfo, being_worker
from libai_data.mesh.peers.pickling import pickled_by_value

_MOST_AT_ONCE = 64
_SECONDS_AT_ONCE = 0.02
_BYTES_AT_ONCE = 8 << 20

_worker_info_lock = threading.Lock()  # locked while `get_worker_info` of this process returns a shard


@dataclass(frozen=True)
class Sharding:
    """How a stream is read."""

    num_shards: int | None = None  # number of shards; None reads the stream as a whole
    shuffle_buffer: int = 0  # size of the buffer from which the next sample is drawn; 0 keeps the order
    seed: int = 0
    # Processes or threads that read the shards; with 0, the thread that reads ahead reads them in turn.
    num_workers: int = 0
    worker_type: str = "process"  # "process" or "thread"
    worker_init_fn: Callable[[int], Any] | None = None  # called with the number of each shard before it is opened
    skips: bool = False  # yield a `FailedRow` for each row that fails

    @property
    def shards(self) -> int:
        return self.num_shards or 1

    @property
    def by_processes(self) -> bool:
        return self.num_workers > 0 and self.worker_type == "process"

    def words(self) -> dict[str, int] | None:
        """The parameters that decide the rows, for the state; None if only the source decides them."""
        if self.shards == 1 and not self.shuffle_buffer:
            return None
        shuffling = {"shuffle_buffer": self.shuffle_buffer, "seed": self.seed} if self.shuffle_buffer else {}
        return {"num_shards": self.shards, **shuffling}


class Part(NamedTuple):
    """The next part of a shard to read: rows from a place on, as many as the limits above allow."""

    epoch: int
    shard: int
    place: ShardPlace


class ShardReader:
    """Reads parts of shards. Each process has a copy, which keeps its shards open.

    `pickled` has the source and `worker_init_fn`. If `asks` is True, the source calls `get_worker_info` to find its
    shard.
    """

    def __init__(self, pickled: bytes, sharding: Sharding, asks: bool, batches: bool | None) -> None:
        self._pickled, self._sharding, self._asks, self._batches = pickled, sharding, asks, batches
        self._open: dict[int, tuple[tuple[int, int], Iterator[Any], SaveState | None, Any]] = {}

    def __call__(self, part: Part) -> tuple[list[Any], bool, str | None]:
        """The rows of a part, whether the shard has ended, and the state after the part if the source has one."""
        generators = marks = None
        next_start, iterator, save, thing = self._open.pop(part.shard, (None, iter(()), None, None))
        if next_start != (part.epoch, part.place.taken):
            thing, init = self._unpickled()
            if self._sharding.by_processes and part.shard == part.place.taken == 0:
                generators = watched()  # not before the modules of the source are imported, because OneFlow's draw
                marks = generators.marks()
            iterator, save = self._opened(part, thing, init)
        items: list[Any] = []
        began, size = perf_counter(), 0
        ended, reuse = True, ReuseCheck("the iterable")
        with self._as_worker(part.shard, thing):
            for item in iterator:
                reuse.see(item)
                items.append(item)
                size += _bytes_of(item)
                if len(items) == _MOST_AT_ONCE or size > _BYTES_AT_ONCE or perf_counter() - began > _SECONDS_AT_ONCE:
                    ended = False
                    break
            state = None if ended or save is None else save()
        if generators is not None:
            name = getattr(thing, "__qualname__", type(thing).__name__)
            warn_of_draws(name, generators, marks, yields_batches(thing) if self._batches is None else self._batches)
        if not ended:
            self._open[part.shard] = (part.epoch, part.place.taken + len(items)), iterator, save, thing
        return items, ended, state

    def _unpickled(self) -> tuple[Any, Callable[[int], Any] | None]:
        """The source and `worker_init_fn`."""
        if self._sharding.by_processes:
            become_worker_process()
            forget_job()
        thing, init = pickle.loads(self._pickled)
        return thing, init

    def _opened(self, part: Part, thing: Any, init: Callable[[int], Any] | None) -> Opened:
        """Open a shard where the part begins."""
        with self._as_worker(part.shard, thing):
            if init is not None:
                init(part.shard)
            source = source_of(thing, self._batches, self._sharding.skips)
            return open_at(source, part.epoch, part.shard, self._sharding.shards, part.place)

    @contextmanager
    def _as_worker(self, shard: int, thing: Any) -> Iterator[None]:
        """Let `get_worker_info`, of this package and of PyTorch, return the shard."""
        is_process = self._sharding.by_processes
        if not (self._asks or is_process):
            yield
            return
        # A process has only one worker info, so threads that read for several loaders read one at a time.
        info = WorkerInfo(shard, self._sharding.shards, self._sharding.seed, thing)
        with nullcontext() if is_process else _worker_info_lock, being_worker(info):
            yield


class ShardedSource(WrappedSource):
    """A source that is read in shards, or shuffled, or both.

    Args:
        thing: see `Source`. A function with `shard` and `num_shards` is called for each shard. Any other source must
            call `get_worker_info`, of this package or of PyTorch, to find out which samples to yield.
    """

    def __init__(self, thing: Any, batches: bool | None, sharding: Sharding) -> None:
        super().__init__(source_of(thing, batches, sharding.skips))
        self._sharding = sharding
        self._takes_shard, self.takes_shard = self.takes_shard, False
        self._lanes: ShardLanes | None = None
        self._reader: ShardReader | None = None
        if sharding.shuffle_buffer and self.batches:
            raise ConfigError(f"shuffle_buffer shuffles samples, but {self.name} yields batches; shuffle its samples")
        if self._takes_shard and sharding.num_shards is None:
            raise ConfigError(
                f"{self.name} has the parameters shard and num_shards: set num_shards, the number of shards to read; "
                "or remove num_workers and shuffle_buffer to call it for each data-parallel rank"
            )
        if sharding == Sharding(None, sharding.shuffle_buffer, sharding.seed, skips=sharding.skips):
            return
        by_threads = sharding.num_workers and not sharding.by_processes
        if by_threads and sharding.shards > 1 and not self._takes_shard:
            raise ConfigError(
                f"worker_type='thread': {self.name} must call get_worker_info to find its shard, but get_worker_info "
                "gives the same answer to all threads of a process. Pass a function with shard and num_shards, or use "
                "worker_type='process'"
            )
        self._thing, self._batches = thing, batches
        self._reader = self._made_reader()

    def _made_reader(self) -> ShardReader:
        sharding = self._sharding
        self._attributes = attributes_of(self._thing)
        try:
            pickled = pickled_by_value((self._thing, sharding.worker_init_fn))
        except Exception as error:
            raise ConfigError(
                f"{self.name} cannot be sent to the workers that read its shards: {error_text(error)}. Pass a function "
                "that opens what cannot be pickled, or remove num_workers and num_shards"
            ) from error
        return ShardReader(pickled, replace(sharding, worker_init_fn=None), not self._takes_shard, self._batches)

    def rounds_to_replay(self, epoch: int) -> int:
        """0 if shards are opened again in each epoch."""
        return super().rounds_to_replay(epoch) if self._reader is None else 0

    def open(self, epoch: int, shard: int, num_shards: int, state: str | None = None) -> Opened:
        """Begin an epoch. Its state has the state of each shard, if the shards have states."""
        alone = Alone()
        with alone.running():
            # An interrupted pass may still open its epoch. It must not end this one.
            alone.use(self, self.name)
            return alone.reading(*self._rows_and_state(epoch, state))

    def _rows_and_state(self, epoch: int, state: str | None) -> Opened:
        if self._reader is not None and not are_same(attributes_of(self._thing), self._attributes):
            self._end_lanes()
            self._reader = self._made_reader()
        buffer, inner = self._sharding.shuffle_buffer, state
        if buffer and state is not None:
            with saved_in(state) as saved:
                inner = json.dumps(saved["source"])
        if self._reader is None:
            rows, save = open_round(self.inner, epoch, 0, 1, inner)
        else:
            places = places_in(inner, self._sharding.shards)
            interleaved = Interleaved(self._shards(self._reader, epoch, places), places, self._refuse_equal)
            rows, save = interleaved.rows(), interleaved.state
        if not buffer:
            return rows, save
        shuffled = ShuffleBuffer(rows, save, buffer, combine64(self._sharding.seed, epoch), state)
        return shuffled.rows(), None if save is None else shuffled.state

    def _shards(self, reader: ShardReader, epoch: int, places: list[ShardPlace]) -> list[Iterator[ShardPart]]:
        sharding = self._sharding
        if not sharding.num_workers:
            return [_read_in_turn(reader, epoch, shard, place) for shard, place in enumerate(places)]
        if self._lanes is None:
            name = self.name  # The lambda must not keep the source alive: its finalizer ends the processes.
            work = Work(reader, lambda part: f"shard {part.shard} of {name}") if sharding.by_processes else None
            if work is not None:
                warn_of_random_hashes(name, random_hashes_of(self._thing))
            lanes = min(sharding.num_workers, sharding.shards)
            self._lanes = ShardLanes(work, reader, lanes, self.name)
        parts = self._lanes.begin(partial(Part, epoch), places)
        if self.closed.is_set:  # Perhaps before there were lanes to end.
            self._end_lanes()
        return parts

    def _refuse_equal(self, one: int, other: int, count: int) -> None:
        """Raise an error if each shard yields all samples, because the iterable does not split itself."""
        if not self._takes_shard:
            raise SchemaError(
                f"shards {one} and {other} of {self.name} begin with the same {count} sample(s), so it does not split "
                "its samples. Let it yield the samples of get_worker_info().id of get_worker_info().num_workers (of "
                "torch.utils.data or libai_data), or pass a function with shard and num_shards"
            )

    def close(self) -> None:
        self._end_lanes()
        super().close()

    def _end_lanes(self) -> None:
        lanes, self._lanes = self._lanes, None
        if lanes is not None:
            lanes.close()


def _bytes_of(item: Any) -> int:
    fields = fields_in(item)
    values = fields.values() if fields is not None else item if isinstance(item, (tuple, list)) else (item,)
    return sum(int(getattr(getattr(value, "tensor", value), "nbytes", 0)) for value in values)


def _read_in_turn(reader: ShardReader, epoch: int, shard: int, place: ShardPlace) -> Iterator[ShardPart]:
    while not place.ended:
        part, place = part_read(place, *reader(Part(epoch, shard, place)))
        if part.rows:
            yield part
