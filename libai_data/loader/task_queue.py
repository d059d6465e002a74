"""The task queue: a pipe of tasks that all workers read, and a pipe of the tasks that are done.

Each task goes to one worker. When a worker reads a task, the system writes the task into memory that the trainer sees,
in the same call. So the trainer knows the claim of a dead worker, at whatever moment the worker died.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import termios
import time
from array import array
from collections import deque
from contextlib import suppress
from typing import NamedTuple

from libai_data.launch.parent_pipe import OwnDescriptors
from libai_data.loader.arena import Arena
from libai_data.loader.stage_times import StageTimes

# A record is shorter than a page, so the system never splits it, and two workers never read parts of one record.
_TASK = struct.Struct("=8q")  # an `Entry`
_DONE = struct.Struct("=q4dq")  # place; seconds of source, transform, copy and idle; samples

_WORKER = mmap.PAGESIZE // 8  # words of a worker in shared memory: its claim, and whether it is asleep
_ASLEEP = 8

_MOST_REMEMBERED = 256
_LONG = 0.002
"""Seconds after which waking a worker for an unclaimed task pays off."""


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
    place: int = 0  # in the task queue, from 1


class TaskQueue(OwnDescriptors):
    """The trainer's side: puts tasks, sees which are claimed and done, and decides which sleeping workers to wake."""

    _names = "_tasks", "_put_end", "_done", "_done_end"
    _tasks = _put_end = _done = _done_end = -1

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._process = os.getpid()
        self._tasks, self._put_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._done, self._done_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._done, False)
        self._shared = Arena()
        # Not a numpy array: a memoryview reads and writes single words three times as fast.
        self._words = self._shared.lease(*self._shared.allocate(workers * mmap.PAGESIZE)).data.cast("q")
        self._last = 0  # place of the newest task
        self._put_at: deque[float] = deque(maxlen=_MOST_REMEMBERED)  # of the newest tasks
        self._backlog: deque[bytes] = deque()  # tasks for which the pipe has had no room yet

    @property
    def descriptors(self) -> tuple[int, int, int]:
        """Descriptors with which workers read tasks, report tasks as done, and map the memory of their claims."""
        return self._tasks, self._done_end, self._shared.descriptor

    def fileno(self) -> int:
        """Descriptor for polling; readable if a task has been done."""
        return self._done

    def put(self, entry: Entry) -> int:
        """Append a task; returns its place."""
        self._last += 1
        self._put_at.append(time.monotonic())
        self._backlog.append(_TASK.pack(*entry[:-1], self._last))
        self._fill_pipe()
        return self._last

    def _fill_pipe(self) -> None:
        with suppress(BlockingIOError):
            while self._backlog:
                os.write(self._put_end, self._backlog[0])
                self._backlog.popleft()

    def take_done(self) -> list[tuple[int, StageTimes]]:
        """Place and times of each task that has been done since the last call."""
        records = os.read(self._done, _unread(self._done))
        self._fill_pipe()
        return [(place, StageTimes(*times)) for place, *times in _DONE.iter_unpack(records)]

    def drop_waiting(self) -> list[int]:
        """Remove all tasks that no worker has claimed; returns their places."""
        records, self._backlog = b"".join(self._backlog), deque()
        with suppress(OSError, ValueError):  # Meanwhile, workers have claimed them all; or a `close` was interrupted.
            records = os.read(self._tasks, _unread(self._tasks)) + records
        return [Entry(*words).place for words in _TASK.iter_unpack(records)]

    def waiting(self) -> int:
        """Number of tasks that no worker has claimed."""
        return _unread(self._tasks) // _TASK.size + len(self._backlog)

    def to_wake(self, may_wait: int) -> list[int]:
        """The worker to wake for a new task, marked as awake: if many tasks wait, or one has waited long.

        Args:
            may_wait: number of tasks that may wait for the workers that are awake. If tasks are short, waking another
                worker costs more than it gains.
        """
        sleepers = self.sleepers()
        waiting = self.waiting() if sleepers else 0
        if waiting > may_wait + self._words[_ASLEEP] or (waiting and self._age_of_oldest(waiting) > _LONG):
            return self._awake(sleepers[:1])
        return []

    def _age_of_oldest(self, waiting: int) -> float:
        return time.monotonic() - self._put_at[-min(waiting, len(self._put_at))]

    def all_to_wake(self) -> list[int]:
        """All workers that sleep, marked as awake, if a task waits."""
        return self._awake(self.sleepers()) if self.waiting() else []

    def sleepers(self) -> list[int]:
        """The workers that wait to be woken."""
        # Without the first worker, which a task wakes. So if one worker is enough, it is always the same one.
        return [worker for worker, asleep in enumerate(self._words[_ASLEEP::_WORKER]) if asleep and worker]

    def _awake(self, workers: list[int]) -> list[int]:
        for worker in workers:
            self._words[worker * _WORKER + _ASLEEP] = 0
        return workers

    def claim(self, worker: int) -> int | None:
        """Place of the task that a worker claimed last; None if there is none."""
        return Entry(*self._words[worker * _WORKER : worker * _WORKER + _ASLEEP]).place or None

    def clear_claim(self, worker: int) -> None:
        """Clear the claim of a worker that has died, and count its successor as awake."""
        for word in range(_ASLEEP + 1):
            self._words[worker * _WORKER + word] = 0

    def close(self) -> None:
        """Close the pipes, and release the memory."""
        self._shared.close()
        self._release(*self._names)


class WorkerTasks:
    """The side of one worker, by number: claims tasks, and reports tasks as done.

    `tasks`, `done` and `claims` are the descriptors of the task queue.
    """

    def __init__(self, worker: int, tasks: int, done: int, claims: int) -> None:
        self._tasks = tasks
        self._done = done
        self._shared = Arena(claims)
        self._words = self._shared.lease(worker * mmap.PAGESIZE, mmap.PAGESIZE).data.cast("q")
        self._claim = self._words[:_ASLEEP]

    def take(self) -> Entry | None:
        """Claim the oldest task; None if no task waits."""
        try:
            if not os.readv(self._tasks, [self._claim]):
                return None  # The trainer is gone.
        except BlockingIOError:
            return None
        return Entry(*self._claim)

    def report(self, place: int, times: StageTimes) -> None:
        """Report a task as done."""
        os.write(self._done, _DONE.pack(place, times.source, times.transform, times.copy, times.idle, times.samples))

    def fileno(self) -> int:
        """Descriptor for polling; readable if a task waits."""
        return self._tasks

    def note_asleep(self, is_asleep: bool) -> None:
        """Note whether the trainer must wake this worker for a task."""
        self._words[_ASLEEP] = is_asleep


def _unread(pipe: int) -> int:
    """Number of bytes in a pipe."""
    unread = array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, unread)
    return unread[0]
