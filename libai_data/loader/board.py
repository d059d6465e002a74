"""The board: the tasks that worker processes share, in shared memory, under a lock that no death leaves held.

A worker takes the oldest task by itself, so that the trainer need not be awake to hand it out. The lock is a POSIX
record lock, which the system releases when its holder dies; every change within it leaves the board usable at each
instant.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import struct
import time
from contextlib import contextmanager, suppress
from typing import Iterator, NamedTuple, Optional, Tuple

_HEAD, _TAIL = 0, 1
_HEADER = 8
_CLAIM = 2
_ENTRY = 6
_FLOCK = struct.Struct("@hhqqi4x")
_SECONDS_TO_HOLD = 5.0
CAPACITY = 4096
"""Tasks that may wait at once."""


class Entry(NamedTuple):
    """A task as it stands on the board; sizes in bytes.

    Args:
        number: the task's.
        offset: of its slot in the arena.
        size: of its slot.
        first_row: the batch's row of its first sample.
        rows: its samples.
        batch_rows: rows of the whole batch.
    """

    number: int
    offset: int
    size: int
    first_row: int
    rows: int
    batch_rows: int


class Board:
    """Tasks in the order in which they were put, and which worker has which.

    Args:
        workers: number of workers.
        descriptors: of a board that another process made: its memory, and the pipe's reading end; by default a new one
            is made.
    """

    def __init__(self, workers: int, descriptors: Optional[Tuple[int, int]] = None) -> None:
        self.workers = workers
        size = 8 * (_HEADER + _CLAIM * workers + _ENTRY * CAPACITY)
        self._write_end = -1
        if descriptors is None:
            self._memory = os.memfd_create("libai_data_board", os.MFD_CLOEXEC)
            os.ftruncate(self._memory, size)
            self._read_end, self._write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        else:
            self._memory, self._read_end = descriptors
        # Not numpy's: of single words, a memoryview reads and writes three times as many.
        words = memoryview(mmap.mmap(self._memory, size)).cast("q")
        self._ends = words[:_HEADER]
        self._claims = words[_HEADER : _HEADER + _CLAIM * workers]
        self._entries = words[_HEADER + _CLAIM * workers :]

    @property
    def descriptors(self) -> Tuple[int, int]:
        """What a worker needs to see this board: its memory, and the pipe to wait on."""
        return self._memory, self._read_end

    def put(self, entry: Entry) -> int:
        """Put a task behind the others; returns its place.

        Raises:
            RuntimeError: The board is full.
        """
        with self._locked():
            place = self._ends[_TAIL]
            if place - self._ends[_HEAD] >= CAPACITY:
                raise RuntimeError(f"more than {CAPACITY} tasks wait; lower prefetch")
            first = place % CAPACITY * _ENTRY
            for word, value in enumerate(entry, start=first):
                self._entries[word] = value
            self._ends[_TAIL] = place + 1
        self.wake()
        return place

    def wake(self) -> None:
        """Let one waiting worker look for a task."""
        # A pipe that is full of calls to look keeps every worker awake as it is.
        with suppress(BlockingIOError):
            os.write(self._write_end, b"+")

    def take(self, worker: int) -> Optional[Entry]:
        """Take the oldest task for a worker, if there is one."""
        with self._locked():
            place = self._ends[_HEAD]
            if place == self._ends[_TAIL]:
                return None
            first = place % CAPACITY * _ENTRY
            entry = Entry(*self._entries[first : first + _ENTRY].tolist())
            # First the claim, then the step: whoever dies between the two has not begun, and another takes the task.
            self._set_claim(worker, place + 1, time.monotonic_ns())
            self._ends[_HEAD] = place + 1
        return entry

    def clear_claim(self, worker: int) -> None:
        """Forget what a worker was doing."""
        self._set_claim(worker, 0, 0)

    def _set_claim(self, worker: int, place: int, since: int) -> None:
        self._claims[_CLAIM * worker], self._claims[_CLAIM * worker + 1] = place, since

    def claim(self, worker: int) -> Tuple[Optional[int], float]:
        """The place of the task that a worker took last and has not cleared, and the seconds since then."""
        with self._locked():
            place, since = self._claims[_CLAIM * worker : _CLAIM * (worker + 1)].tolist()
        if place == 0:
            return None, 0.0
        return place - 1, (time.monotonic_ns() - since) / 1e9

    def is_waiting(self, place: int) -> bool:
        """Whether the task at this place has been taken by nobody yet."""
        with self._locked():
            return place >= self._ends[_HEAD]

    def oldest_waiting(self) -> Optional[int]:
        """The place of the task that will be taken next, if one waits."""
        with self._locked():
            head = self._ends[_HEAD]
            return head if head < self._ends[_TAIL] else None

    def close_writing_end(self) -> None:
        """Close what no worker may hold: without a writing end, whoever waits at the pipe ends."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1

    def close(self) -> None:
        """Let go of the board; waiting workers end."""
        self.close_writing_end()
        for descriptor in (self._memory, self._read_end):
            if descriptor >= 0:
                os.close(descriptor)
        self._memory = self._read_end = -1

    def _lock_for_trainer(self) -> None:
        """Take the lock; whoever keeps it for long has been stopped in the midst, and is killed."""
        deadline = time.monotonic() + _SECONDS_TO_HOLD
        while True:
            try:
                fcntl.lockf(self._memory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except (BlockingIOError, PermissionError):
                if time.monotonic() > deadline:
                    self._kill_holder()
                    deadline = time.monotonic() + _SECONDS_TO_HOLD
                time.sleep(0.0001)

    def _kill_holder(self) -> None:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, holder = _FLOCK.unpack(fcntl.fcntl(self._memory, fcntl.F_GETLK, asked))
        if kind != fcntl.F_UNLCK:
            with suppress(ProcessLookupError):
                os.kill(holder, signal.SIGKILL)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self._write_end < 0:
            fcntl.lockf(self._memory, fcntl.LOCK_EX)
        else:
            self._lock_for_trainer()
        try:
            yield
        finally:
            fcntl.lockf(self._memory, fcntl.LOCK_UN)
