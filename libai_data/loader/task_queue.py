"""The task queue: the tasks that worker processes share, in shared memory, under a lock that no death leaves held.

A worker takes the oldest task by itself, and says there that it has done it, so that the trainer need be awake neither
to hand out tasks nor to hear of results; who does wait is woken by an event. The lock is a POSIX record lock, which the
system releases when its holder dies; every change within it leaves the task queue usable at each instant.
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
from typing import Callable, NamedTuple

from libai_data.loader.event import Event
from libai_data.loader.stage_times import StageTimes

CAPACITY = 4096
"""Tasks that may wait, or be under way, at once."""

_HEADER = 8
_HEAD, _TAIL, _TRAINER_WAITS, _STOPPED = 0, 1, 2, 3

_WORKER = 4
_CLAIM, _SINCE, _SLEEPS, _WOKEN_AT = 0, 1, 2, 3

_TASK = 7
_TIMES = 4
_SAMPLES = _TASK + _TIMES
_DONE = _SAMPLES + 1
_PUT_AT = _DONE + 1
_ENTRY = _PUT_AT + 1

_FLOCK = struct.Struct("@hhqqi4x")
_SECONDS_TO_HOLD = 5.0
_TURNS_BEFORE_SLEEP = 20
_LONG = 2_000_000
"""Nanoseconds after which a task that nobody has taken is worth waking a worker for."""


class Entry(NamedTuple):
    """A task as it stands on the task queue; sizes in bytes."""

    offset: int  # of its slot in the arena
    size: int  # of its slot
    first_row: int  # the batch's row of its first sample
    rows: int  # its samples
    batch_rows: int  # rows of the whole batch
    # 1 if its samples are not to be tried, since workers have ended over them; others take their place.
    hopeless: int = 0
    position: int = 0  # in the stream, of the global batch's first sample


class TaskQueue:
    """Tasks in the order in which they were put, which worker has which, and which are done.

    Args:
        descriptors: of a queue that another process made: its memory, the trainer's event, and one event a worker; by
            default a new one is made, and this process is the trainer.
    """

    _memory = _process = -1

    def __init__(self, workers: int, descriptors: tuple[int, int, list[int]] | None = None) -> None:
        self.workers = workers
        self._process = os.getpid() if descriptors is None else -1
        size = 8 * (_HEADER + _WORKER * workers + _ENTRY * CAPACITY)
        self._is_trainers = descriptors is None
        if descriptors is None:
            self._memory = os.memfd_create("libai_data_board", os.MFD_CLOEXEC)
            os.ftruncate(self._memory, size)
            self.event = Event()
            self._wakers = [Event() for _ in range(workers)]
        else:
            self._memory, event, wakers = descriptors
            self.event = Event(event)
            self._wakers = [Event(waker) for waker in wakers]
        # Not numpy's: of single words, a memoryview reads and writes three times as many.
        mapped = memoryview(mmap.mmap(self._memory, size))
        words = mapped.cast("q")
        self._ends = words[:_HEADER]
        self._of_workers = words[_HEADER : _HEADER + _WORKER * workers]
        self._entries = words[_HEADER + _WORKER * workers :]
        self._times = mapped.cast("d")[_HEADER + _WORKER * workers :]

    @property
    def descriptors(self) -> tuple[int, int, list[int]]:
        """What a worker needs to see this task queue."""
        return self._memory, self.event.fileno(), [waker.fileno() for waker in self._wakers]

    def waker(self, worker: int) -> Event:
        """What a worker that has found no task waits for."""
        return self._wakers[worker]

    def put(self, entry: Entry, may_wait: int = 0) -> int:
        """Put a task behind the others; returns its place.

        A worker that sleeps is woken if all do, if more than `may_wait` tasks wait, or if one has waited for long.

        Args:
            may_wait: tasks that the workers that are awake may find waiting. Where tasks are done in no time, to wake
                another worker for them would cost more than it gains.
        """
        self._lock()
        try:
            place = self._ends[_TAIL]
            if place - self._ends[_HEAD] >= CAPACITY:
                raise RuntimeError(f"more than {CAPACITY} tasks wait; lower prefetch")
            first = place % CAPACITY * _ENTRY
            for word, value in enumerate(entry, start=first):
                self._entries[word] = value
            self._entries[first + _DONE] = 0
            self._entries[first + _PUT_AT] = now = time.monotonic_ns()
            self._ends[_TAIL] = place + 1
            sleeper = self._sleeper(may_wait, now)
        finally:
            self._unlock()
        if sleeper is not None:
            self._wakers[sleeper].set()
        return place

    def stop(self) -> None:
        """Let workers take no more tasks."""
        self._ends[_STOPPED] = 1

    def wake(self) -> None:
        """Let the workers that sleep look for tasks, if any waits."""
        self._lock()
        try:
            sleepers = self._sleepers() if self._ends[_HEAD] < self._ends[_TAIL] else []
            for worker in sleepers:
                self._set_awake(worker, time.monotonic_ns())
        finally:
            self._unlock()
        for worker in sleepers:
            self._wakers[worker].set()

    def _sleepers(self) -> list[int]:
        return [worker for worker, sleeps in enumerate(self._of_workers[_SLEEPS::_WORKER]) if sleeps]

    def _sleeper(self, may_wait: int, now: int) -> int | None:
        """The worker to wake, which from now on counts as awake."""
        sleepers = self._sleepers()
        head = self._ends[_HEAD]
        if not sleepers or (
            len(sleepers) < self.workers
            and self._ends[_TAIL] - head <= may_wait
            and now - self._entries[head % CAPACITY * _ENTRY + _PUT_AT] < _LONG
        ):
            return None
        # The first, so that it is always the same if one is enough: its caches are warm.
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
        """Take the oldest task for a worker; returns its place and it. If there is none, the worker counts as asleep.

        Args:
            done: what the task that it has claimed took; None if it has claimed none, or has told the trainer itself.
        """
        self._lock()
        try:
            trainer_waits = done is not None and self._note_done(worker, done)
            place = self._ends[_HEAD]
            taken = None
            if place == self._ends[_TAIL] or self._ends[_STOPPED]:
                self._of_workers[_WORKER * worker + _SLEEPS] = 1
            else:
                first = place % CAPACITY * _ENTRY
                taken = place, Entry(*self._entries[first : first + _TASK].tolist())
                # First the claim, then the step: whoever dies between the two has not begun, and another takes it.
                self._set_claim(worker, place + 1, time.monotonic_ns())
                self._ends[_HEAD] = place + 1
        finally:
            self._unlock()
        if trainer_waits:
            self.event.set()
        return taken

    def _note_done(self, worker: int, times: StageTimes) -> bool:
        """Mark a worker's claimed task as done; returns whether the trainer waits for that."""
        place = self._of_workers[_WORKER * worker + _CLAIM] - 1
        first = place % CAPACITY * _ENTRY
        seconds = times.source, times.transform, times.copy, times.idle
        for word, value in enumerate(seconds, start=first + _TASK):
            self._times[word] = value
        self._entries[first + _SAMPLES] = times.samples
        # Last, since the trainer looks at it without the lock.
        self._entries[first + _DONE] = 1
        if self._ends[_TRAINER_WAITS] != place + 1:
            return False
        self._ends[_TRAINER_WAITS] = 0
        return True

    def is_done(self, place: int) -> bool:
        """Whether the task at this place has been done."""
        return bool(self._entries[place % CAPACITY * _ENTRY + _DONE])

    def done_of(self, places: Iterable[int]) -> list[int]:
        """Those of some places whose tasks have been done."""
        entries = self._entries
        return [place for place in places if entries[place % CAPACITY * _ENTRY + _DONE]]

    def times(self, place: int) -> StageTimes:
        """What the task at this place, which is done, took."""
        first = place % CAPACITY * _ENTRY
        source, transform, copy, idle = self._times[first + _TASK : first + _SAMPLES].tolist()
        return StageTimes(source, transform, copy, idle, self._entries[first + _SAMPLES])

    def trainer_waits(self, place: int) -> bool:
        """Note that the trainer waits until the task at this place is done; returns False if it is.

        Whoever finishes it sets `event`.
        """
        self._lock()
        try:
            if self.is_done(place):
                return False
            self._ends[_TRAINER_WAITS] = place + 1
            return True
        finally:
            self._unlock()

    def clear_claim(self, worker: int) -> None:
        """Forget what a worker was doing, and whether it sleeps."""
        self._of_workers[_WORKER * worker + _SLEEPS] = 0
        self._set_claim(worker, 0, 0)

    def _set_claim(self, worker: int, place: int, since: int) -> None:
        first = _WORKER * worker
        self._of_workers[first + _CLAIM], self._of_workers[first + _SINCE] = place, since

    def claim(self, worker: int) -> tuple[int | None, float]:
        """The place of the task that a worker took last and has not cleared, and the seconds since then."""
        self._lock()
        try:
            first = _WORKER * worker
            place, since = self._of_workers[first + _CLAIM], self._of_workers[first + _SINCE]
        finally:
            self._unlock()
        if place == 0:
            return None, 0.0
        return place - 1, (time.monotonic_ns() - since) / 1e9

    def is_waiting(self, place: int) -> bool:
        """Whether the task at this place has been taken by nobody yet."""
        self._lock()
        try:
            return place >= self._ends[_HEAD]
        finally:
            self._unlock()

    def drop_waiting(self) -> range:
        """Take all tasks off the task queue that no worker has taken; returns their places."""
        self._lock()
        try:
            head, tail = self._ends[_HEAD], self._ends[_TAIL]
            self._ends[_HEAD] = tail
        finally:
            self._unlock()
        return range(head, tail)

    def oldest_waiting(self) -> int | None:
        """The place of the task that will be taken next, if one waits."""
        self._lock()
        try:
            head = self._ends[_HEAD]
            return head if head < self._ends[_TAIL] else None
        finally:
            self._unlock()

    def close(self) -> None:
        """Let go of the task queue."""
        for event in (self.event, *self._wakers):
            event.close()
        self._close_memory()

    def _close_memory(self) -> None:
        if self._memory >= 0:
            os.close(vars(self).pop("_memory"))  # see `Event`

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # An interrupt may have come before there was anything else; see `Event`, too.
        if not is_finalizing() and self._process == os.getpid():
            self._close_memory()

    def _lock(self) -> None:
        if not self._is_trainers:
            fcntl.lockf(self._memory, fcntl.LOCK_EX)
            return
        # Whoever keeps the lock for long has been stopped in the midst, and is killed.
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

    def _unlock(self) -> None:
        fcntl.lockf(self._memory, fcntl.LOCK_UN)

    def _kill_holder(self) -> None:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, holder = _FLOCK.unpack(fcntl.fcntl(self._memory, fcntl.F_GETLK, asked))
        if kind != fcntl.F_UNLCK:
            with suppress(ProcessLookupError):
                os.kill(holder, signal.SIGKILL)
