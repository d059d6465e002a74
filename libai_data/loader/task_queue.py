"""The task queue: tasks in memory that all workers share, under a lock that the system releases if its holder dies.

A worker claims the oldest task, and marks it in the queue when it is done. So the trainer need not be awake to hand out
tasks or to receive results. An event wakes a process that waits. The lock is a POSIX record lock (fcntl(2)). If its
holder dies between two writes to the queue, the queue stays usable.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Callable, NamedTuple

from libai_data.loader.event import Event
from libai_data.loader.stage_times import StageTimes

CAPACITY = 4096
"""The most tasks that may wait or be read at once."""

_HEADER = 8
_HEAD, _TAIL, _TRAINER_WAITS, _STOPPED = 0, 1, 2, 3

_WORKER = 4
_CLAIM, _SINCE, _SLEEPS, _WOKEN_AT = 0, 1, 2, 3

# In one call each: words that are read or written one by one cost three times as much.
_TASK = struct.Struct("=7q")  # an `Entry`
_TIMES = struct.Struct("=4dq")  # source, transform, copy, idle, samples
_DONE = (_TASK.size + _TIMES.size) // 8
_PUT_AT = _DONE + 1
_ENTRY = _PUT_AT + 1

_FLOCK = struct.Struct("@hhqqi4x")
_SECONDS_TO_HOLD = 5.0
_TURNS_BEFORE_SLEEP = 20
_LONG = 2_000_000
"""Nanoseconds after which waking a worker for an unclaimed task pays off."""


class Entry(NamedTuple):
    """A task in the task queue; offset and size in bytes."""

    offset: int  # of its slot in the arena
    size: int  # of its slot
    first_row: int  # row in the batch of its first sample
    rows: int  # number of its samples
    batch_rows: int  # rows of the whole batch
    # 1 if workers died or hung over its samples, so that only substitutes are read.
    substitute_only: int = 0
    position: int = 0  # position in the stream of the global batch's first sample


class TaskQueue:
    """Tasks in the order of `put`, the claims of the workers, and which tasks are done.

    As a context manager, it keeps the lock.

    Args:
        descriptors: those of a queue that another process made: memory, the trainer's event, one event per worker. By
            default, a new queue is made, and this process is the trainer.
    """

    _memory = _process = -1

    def __init__(self, workers: int, descriptors: tuple[int, int, list[int]] | None = None) -> None:
        self.workers = workers
        self._process = os.getpid() if descriptors is None else -1
        size = 8 * (_HEADER + _WORKER * workers + _ENTRY * CAPACITY)
        if descriptors is None:
            self._memory = os.memfd_create("libai_data_board", os.MFD_CLOEXEC)
            os.ftruncate(self._memory, size)
            self.event = Event()
            self._wakers = [Event() for _ in range(workers)]
        else:
            self._memory, event, wakers = descriptors
            self.event = Event(event)
            self._wakers = [Event(waker) for waker in wakers]
        # Not a numpy array: a memoryview reads and writes single words three times as fast.
        words = memoryview(mmap.mmap(self._memory, size)).cast("q")
        self._ends = words[:_HEADER]
        self._of_workers = words[_HEADER : _HEADER + _WORKER * workers]
        self._entries = words[_HEADER + _WORKER * workers :]

    @property
    def descriptors(self) -> tuple[int, int, list[int]]:
        """Descriptors with which a worker opens this task queue."""
        return self._memory, self.event.fileno(), [waker.fileno() for waker in self._wakers]

    def waker(self, worker: int) -> Event:
        """The event that a worker waits for if it has found no task."""
        return self._wakers[worker]

    def put(self, entry: Entry, may_wait: int = 0, oldest: int | None = None) -> int:
        """Append a task; returns its place.

        A sleeping worker is woken if all workers sleep, if more than `may_wait` tasks wait, or if one has waited long.

        Args:
            may_wait: number of tasks that may wait for the workers that are awake. If tasks are short, waking another
                worker costs more than it gains.
            oldest: place of the oldest task whose result the trainer has not used; None if there is none.
        """
        with self:
            place = self._ends[_TAIL]
            if place - (self._ends[_HEAD] if oldest is None else oldest) >= CAPACITY:
                raise RuntimeError(f"more than {CAPACITY} tasks wait for workers; lower prefetch")
            first = place % CAPACITY * _ENTRY
            _TASK.pack_into(self._entries, 8 * first, *entry)
            self._entries[first + _DONE] = 0
            self._entries[first + _PUT_AT] = now = time.monotonic_ns()
            self._ends[_TAIL] = place + 1
            sleeper = self._sleeper(may_wait, now)
        if sleeper is not None:
            self._wakers[sleeper].set()
        return place

    def stop(self) -> None:
        """Let workers claim no more tasks."""
        self._ends[_STOPPED] = 1

    def wake(self) -> None:
        """Wake all workers that sleep, if a task waits."""
        with self:
            sleepers = self._sleepers() if self._ends[_HEAD] < self._ends[_TAIL] else []
            for worker in sleepers:
                self._set_awake(worker, time.monotonic_ns())
        for worker in sleepers:
            self._wakers[worker].set()

    def _sleepers(self) -> list[int]:
        return [worker for worker, sleeps in enumerate(self._of_workers[_SLEEPS::_WORKER]) if sleeps]

    def _sleeper(self, may_wait: int, now: int) -> int | None:
        """Choose the worker to wake, and mark it as awake; None if none is to be woken."""
        sleepers = self._sleepers()
        head = self._ends[_HEAD]
        if not sleepers or (
            len(sleepers) < self.workers
            and self._ends[_TAIL] - head <= may_wait
            and now - self._entries[head % CAPACITY * _ENTRY + _PUT_AT] < _LONG
        ):
            return None
        # Always the first: if one worker is enough, it is always the same one, with warm caches.
        self._set_awake(sleepers[0], now)
        return sleepers[0]

    def _set_awake(self, worker: int, now: int) -> None:
        first = _WORKER * worker
        self._of_workers[first + _WOKEN_AT], self._of_workers[first + _SLEEPS] = now, 0

    def seconds_awake(self, worker: int) -> float:
        """Seconds since a worker was woken last; 0 while it sleeps."""
        first = _WORKER * worker
        if self._of_workers[first + _SLEEPS]:
            return 0.0
        return (time.monotonic_ns() - self._of_workers[first + _WOKEN_AT]) / 1e9

    def take(self, worker: int, done: StageTimes | None = None) -> tuple[int, Entry] | None:
        """Claim the oldest task for a worker; returns its place and the task. Without a task, the worker is asleep.

        Args:
            done: times of the task that it claimed before; None without one, or if it sent the result to the trainer.
        """
        with self:
            trainer_waits = done is not None and self._note_done(worker, done)
            place = self._ends[_HEAD]
            taken = None
            if place == self._ends[_TAIL] or self._ends[_STOPPED]:
                self._of_workers[_WORKER * worker + _SLEEPS] = 1
            else:
                first = place % CAPACITY * _ENTRY
                taken = place, Entry(*_TASK.unpack_from(self._entries, 8 * first))
                # First the claim, then the head: if the worker dies between the two, another worker claims the task.
                self._set_claim(worker, place + 1, time.monotonic_ns())
                self._ends[_HEAD] = place + 1
        if trainer_waits:
            self.event.set()
        return taken

    def _note_done(self, worker: int, times: StageTimes) -> bool:
        """Mark a worker's claimed task as done; returns whether the trainer waits for this task."""
        place = self._of_workers[_WORKER * worker + _CLAIM] - 1
        first = place % CAPACITY * _ENTRY
        counted = times.source, times.transform, times.copy, times.idle, times.samples
        _TIMES.pack_into(self._entries, 8 * first + _TASK.size, *counted)
        # Written last, because the trainer reads this word without the lock.
        self._entries[first + _DONE] = 1
        if self._ends[_TRAINER_WAITS] != place + 1:
            return False
        self._ends[_TRAINER_WAITS] = 0
        return True

    def is_done(self, place: int) -> bool:
        """Whether the task at this place has been done."""
        return bool(self._entries[place % CAPACITY * _ENTRY + _DONE])

    def done_of(self, places: Iterable[int]) -> list[int]:
        """The places among `places` whose tasks have been done."""
        entries = self._entries
        return [place for place in places if entries[place % CAPACITY * _ENTRY + _DONE]]

    def times(self, place: int) -> StageTimes:
        """Times of the task at this place, which must be done."""
        first = place % CAPACITY * _ENTRY
        return StageTimes(*_TIMES.unpack_from(self._entries, 8 * first + _TASK.size))

    def trainer_waits(self, place: int) -> bool:
        """Note that the trainer waits until the task at this place is done; returns False if it is done already.

        The worker that finishes the task sets `event`.
        """
        with self:
            if self.is_done(place):
                return False
            self._ends[_TRAINER_WAITS] = place + 1
            return True

    def clear_claim(self, worker: int) -> None:
        """Clear a worker's claim, and count the worker as awake."""
        self._of_workers[_WORKER * worker + _SLEEPS] = 0
        self._set_claim(worker, 0, 0)

    def _set_claim(self, worker: int, place: int, since: int) -> None:
        first = _WORKER * worker
        self._of_workers[first + _CLAIM], self._of_workers[first + _SINCE] = place, since

    def claim(self, worker: int) -> tuple[int | None, float]:
        """Place of the task that a worker claimed last, None if the claim was cleared; and the seconds since then."""
        with self:
            first = _WORKER * worker
            place, since = self._of_workers[first + _CLAIM], self._of_workers[first + _SINCE]
        if place == 0:
            return None, 0.0
        return place - 1, (time.monotonic_ns() - since) / 1e9

    def is_waiting(self, place: int) -> bool:
        """Whether no worker has claimed the task at this place yet."""
        with self:
            return place >= self._ends[_HEAD]

    def drop_waiting(self) -> range:
        """Remove all tasks that no worker has claimed; returns their places."""
        with self:
            head, tail = self._ends[_HEAD], self._ends[_TAIL]
            self._ends[_HEAD] = tail
        return range(head, tail)

    def seconds_waiting(self) -> float:
        """Seconds since the task that will be claimed next was put; 0 if no task waits."""
        with self:
            head = self._ends[_HEAD]
            if head == self._ends[_TAIL]:
                return 0.0
            return (time.monotonic_ns() - self._entries[head % CAPACITY * _ENTRY + _PUT_AT]) / 1e9

    def close(self) -> None:
        """Close the events, and release the memory."""
        for event in (self.event, *self._wakers):
            event.close()
        self._close_memory()

    def _close_memory(self) -> None:
        if self._memory >= 0:
            os.close(vars(self).pop("_memory"))  # see `Event`

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # An interrupt may have come when there was only the memory; see also `Event`.
        if not is_finalizing() and self._process == os.getpid():
            self._close_memory()

    def __enter__(self) -> None:
        if self._process < 0:  # a worker
            fcntl.lockf(self._memory, fcntl.LOCK_EX)
            return
        # A worker that keeps the lock for long was stopped while it had the lock. The trainer kills it.
        turns, deadline = 0, 0.0
        while True:
            try:
                fcntl.lockf(self._memory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except (BlockingIOError, PermissionError):
                turns += 1
            if turns < _TURNS_BEFORE_SLEEP:
                os.sched_yield()
                continue
            deadline = deadline or time.monotonic() + _SECONDS_TO_HOLD
            if time.monotonic() > deadline:
                self._kill_holder()
                deadline = 0.0
            time.sleep(0.0001)

    def __exit__(self, *_: Any) -> None:
        fcntl.lockf(self._memory, fcntl.LOCK_UN)

    def _kill_holder(self) -> None:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, holder = _FLOCK.unpack(fcntl.fcntl(self._memory, fcntl.F_GETLK, asked))
        if kind != fcntl.F_UNLCK:
            with suppress(ProcessLookupError):
                os.kill(holder, signal.SIGKILL)
