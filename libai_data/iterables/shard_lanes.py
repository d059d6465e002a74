"""Lanes: threads that each read some shards of a stream ahead."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional

from libai_data.data.shard_work.process_pool import ProcessPool, Work
from libai_data.errors import PassError
from libai_data.iterables.interleaved import ShardPart, ShardPlace, part_read
from libai_data.iterables.prefetcher import Flag
from libai_data.loader.daemon_thread import DaemonThread
from libai_data.loader.resumable import finish

_PARTS_AHEAD = 2  # parts of each shard that a lane reads ahead

Read = Callable[[Any], tuple[list[Any], bool, Optional[str]]]
MakePart = Callable[[int, ShardPlace], Any]


class _Round:
    """The shards of one epoch, while they are read."""

    def __init__(self, make_part: MakePart, places: Sequence[ShardPlace]) -> None:
        self.make_part = make_part
        self.parts: list[deque[ShardPart]] = [deque() for _ in places]
        self.places = list(places)  # where the next part of each shard begins
        self.error: BaseException | None = None
        self.is_over = False
        # `with` enters the lock itself, because a Ctrl-C within `Condition.__enter__` would leave the lock locked.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)

    def next_shard(self, shards: range) -> int | None:
        """Wait until a shard needs rows, and return the one with the fewest parts; None if all, or the epoch, ended."""
        with self.lock:
            while True:
                open_ones = [shard for shard in shards if not self.places[shard].ended]
                if not open_ones or self.is_over:
                    return None
                # The consumer may wait for the emptiest shard, so this one is read first.
                emptiest = min(open_ones, key=lambda shard: len(self.parts[shard]))
                if len(self.parts[emptiest]) < _PARTS_AHEAD:
                    return emptiest
                self.changed.wait()

    def add(self, shard: int, rows: list[Any], ended: bool, state: str | None) -> None:
        with self.lock:
            part, self.places[shard] = part_read(self.places[shard], rows, ended, state)
            if rows:
                self.parts[shard].append(part)
            self.changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        with self.lock:
            self.error, self.is_over = self.error or error, True
            self.changed.notify_all()

    def take(self, shard: int) -> Iterator[ShardPart]:
        """Yield the parts of a shard, in order; waits for parts that are still being read."""
        while True:
            with self.lock:
                while not self.parts[shard] and not self.places[shard].ended and not self.is_over:
                    self.changed.wait()
                if self.error is not None:
                    # Its traceback refers to those that read the lanes, which would live as long as the lanes.
                    error, self.error = self.error, None
                    raise error
                if not self.parts[shard] and self.places[shard].ended:
                    return
                if not self.parts[shard]:  # Not the end of the epoch: nobody may take it for that.
                    raise PassError("the shards were closed, or another pass reads them; make a new iterator")
                taken = self.parts[shard].popleft()
                self.changed.notify_all()
            yield taken


class ShardLanes:
    """Reads the shards of one epoch after the other, in processes by `work`, or in the lanes' threads by `read`."""

    def __init__(self, work: Work[Any, Any] | None, read: Read, lanes: int, name: str) -> None:
        pool = None if work is None else ProcessPool(work)
        self._rounds: list[queue.SimpleQueue[_Round | None]] = [queue.SimpleQueue() for _ in range(lanes)]
        self._newest: list[_Round] = []
        self._ended = Flag()
        self._close = weakref.finalize(self, _end, self._ended, self._rounds, self._newest, pool)
        for number, rounds in enumerate(self._rounds):
            do = read if pool is None else pool.do
            DaemonThread(_run, (rounds, do, number, lanes), f"reads {name} ahead, lane {number}").start()

    def begin(self, make_part: MakePart, places: Sequence[ShardPlace]) -> list[Iterator[ShardPart]]:
        """Begin an epoch, and end the epoch before; returns the parts of each shard.

        `make_part` gives the part to read next at a shard's place. Shard `s` is read by lane `s` modulo their number.
        """
        if self._ended.is_set:
            raise RuntimeError("a stream with shards cannot be read any more when the program ends")
        for older in self._newest:
            older.end()
        begun = _Round(make_part, places)
        self._newest[:] = [begun]
        for rounds in self._rounds:
            rounds.put(begun)
        if self._ended.is_set:  # Another thread ends the lanes, and perhaps did not see this epoch.
            begun.end()
        return [begun.take(shard) for shard in range(len(places))]

    def close(self) -> None:
        """End the lanes, and kill their processes."""
        finish(self._close)


def _run(rounds: queue.SimpleQueue[_Round | None], read: Read, number: int, lanes: int) -> None:
    while (begun := rounds.get()) is not None:
        shards = range(number, len(begun.parts), lanes)
        try:
            while (shard := begun.next_shard(shards)) is not None:
                begun.add(shard, *read(begun.make_part(shard, begun.places[shard])))
        except BaseException as error:
            begun.end(error)


def _end(
    ended: Flag,
    rounds: list[queue.SimpleQueue[_Round | None]],
    newest: list[_Round],
    pool: ProcessPool[Any, Any] | None,
) -> None:
    ended.is_set = True
    for begun in newest:
        begun.end()
    for each in rounds:
        each.put(None)
    if pool is not None:
        pool.close()
