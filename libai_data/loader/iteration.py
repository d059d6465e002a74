"""One pass over a stream: batches are submitted ahead, and handed out in order."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any, Callable, Optional

from libai_data.data.fork_lock import end_fork
from libai_data.data.random.sample_random import end_blocks_since, this_thread
from libai_data.data.samplers.cursor import Cursor
from libai_data.errors import PassError
from libai_data.loader.batch_reader import BatchReader, PendingBatch, ReadyBatch
from libai_data.loader.one_thread import USER, OneThread
from libai_data.loader.stage_times import LoaderTimes, summary
from libai_data.structures import Instance

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_HINTS = 60.0
_WAITING_WORTH_A_HINT = 0.1

LOADER_CLOSED = "the loader was closed; iter(loader) starts it again"

Take = Callable[[], Optional[tuple[Instance, Cursor]]]
"""Waits for the next batch of a pass; returns the batch and the cursor after it, or None at the end of the pass."""


class Pass:
    """What `iter(loader)` returns: the batches of one pass.

    A pass that has failed raises the same error again. A pass that was interrupted raises a `PassError`. After both,
    the loader can be iterated again.

    The stream's cursor moves in the last line that runs before the user has the batch. So if an interrupt comes before
    the user has the batch, the next pass begins with this batch.
    """

    def __init__(self, stream: Any, first: Cursor, take: Take, one_thread: OneThread) -> None:
        self.stream = stream  # the sampler; its cursor is after the batch that was returned last
        self.first = first  # the cursor where the pass begins
        self.take = take  # waits for the next batch
        self._one_thread = one_thread
        self._cursor = first
        self._process = os.getpid()
        self._is_over = False
        self._is_taking = False
        self._error: Exception | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an iterator of a loader cannot be copied or pickled; use state_dict() of the loader")

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Instance:
        # Checks are made here before the functions that report what they find, because a call costs more than a check.
        one_thread, own = self._one_thread, get_ident()
        if one_thread.users.setdefault(USER, own) != own:
            one_thread.begin()
        try:
            if self._error is not None:
                raise self._error
            if self._is_over:
                raise StopIteration
            if self._is_taking:
                raise PassError(
                    "this iterator was interrupted while it read a batch; make a new one, with iter(loader)"
                )
            if os.getpid() != self._process:
                refuse_in_fork(self._process, "this iterator")
            self._is_taking = True
            try:
                taken = self.take()
            except Exception as error:
                self._error = error
                raise
            finally:
                if os.getpid() != self._process:
                    end_fork()
            if self.stream.cursor is not self._cursor:
                # The cursor, and so the state of this loader, no longer belongs to this pass.
                self._error = PassError(
                    f"the {type(self.stream).__name__} of this loader was moved during this pass: by another loader "
                    "that has the same sampler, or by its set_epoch or load_state_dict. Make a sampler of its own for "
                    "each loader, and move it between two passes, or by the loader's methods"
                )
                raise self._error
            if taken is None:
                self.stream.cursor = self.stream.after_pass()
                self._is_over = True
                raise StopIteration
            batch, self._cursor = taken
            stream = self.stream
            # In one line and without a call, after which Python may run a signal handler or another thread. Python 3.9
            # may do so after each assignment.
            self._is_taking, one_thread.users, stream.cursor = False, {}, self._cursor; return batch  # noqa: E702  # fmt: skip
        except BaseException:
            one_thread.users = {}
            raise


def refuse_in_fork(process: int, what: str) -> None:
    """Raise an error if this process is a fork of `process`, whose threads, workers and memory `what` uses."""
    if process != os.getpid():
        raise PassError(
            f"{what} belongs to process {process}, of which this process is a fork; make a loader in this process"
        )


class Iteration:
    """Reads the batches of a stream, from a position on.

    Args:
        ahead: number of batches to read ahead.
        reached: called with the position of a batch that is handed out. Each returns the first position of which it
            must know next, so that most batches need no call.
        turns: lock for beginning or interrupting the use of the reader, because threads may share a loader.
    """

    def __init__(
        self,
        stream: Any,
        position: int,
        reader: BatchReader,
        ahead: int,
        times: LoaderTimes,
        reached: Sequence[Callable[[int], int]],
        turns: AbstractContextManager[Any],
    ) -> None:
        self._reader = reader
        self._reached, self._next_reached = reached, 0 if reached else sys.maxsize
        self._turns = turns
        self._ahead = ahead
        self._times = times
        self._plan = stream.batches(position)
        self._pending: deque[PendingBatch] = deque()
        self._over = False
        self._end_message = ""
        self._handed_out: float | None = None
        self._next_hint = time.perf_counter() + _SECONDS_BETWEEN_HINTS

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> ReadyBatch:
        asked, reading = time.perf_counter(), this_thread.reading
        with self._turns:
            if self._end_message:
                raise PassError(self._end_message)
            if self._over:
                raise StopIteration
            # A Ctrl-C may come between any two lines, and so lose a task or a slot.
            self._reader.is_unusable = True
        try:
            if self._ahead:
                self._submit_ahead()
                batch = self._reader.finish(self._pending[0]) if self._pending else None
            else:
                planned = next(self._plan, None)
                batch = None if planned is None else self._reader.read(planned)
        except BaseException as error:
            end_blocks_since(reading)
            if self._end_message and isinstance(error, Exception):
                raise PassError(self._end_message) from error
            if error is self._reader.error:
                # Only this batch failed; the workers continue.
                self._reader.error = None
                self.break_off()
                self._over = True
            raise
        if self._end_message:
            # Another thread has closed the loader, and with it the memory of this batch, while it was written.
            raise PassError(self._end_message)
        if self._pending:
            self._pending.popleft()
        self._reader.is_unusable = False
        if batch is None:
            self._over = True
            raise StopIteration
        now, times = time.perf_counter(), self._times
        if self._handed_out is not None:
            times.waiting += now - asked
            times.between += asked - self._handed_out
        times.batches += 1
        self._handed_out = now
        if now > self._next_hint:
            self._give_hint(now)
        if batch.index_batch.position >= self._next_reached:
            self._next_reached = min(each(batch.index_batch.position) for each in self._reached)
        return batch

    def next_if_ready(self) -> ReadyBatch | None:
        """The next batch if it has been read already, otherwise None; never waits."""
        if self._over or self._end_message or not self._pending:
            return None
        self._reader.is_unusable = True
        is_done = self._reader.is_done(self._pending[0])
        self._reader.is_unusable = False
        return next(self) if is_done else None

    def _submit_ahead(self) -> None:
        # A batch that failed ends the pass. If the first sample kills workers, reading more batches kills them again.
        while len(self._pending) <= self._ahead and not (self._pending and self._pending[-1].error):
            index_batch = next(self._plan, None)
            if index_batch is None:
                return
            self._pending.append(self._reader.submit(index_batch))

    def _give_hint(self, now: float) -> None:
        times, self._next_hint = self._times, now + _SECONDS_BETWEEN_HINTS
        if times.waiting_share() > _WAITING_WORTH_A_HINT:
            logger.info(
                "The trainer has waited for data %.0f %% of the time; most of a worker's time goes into '%s' (see "
                "loader.stats()). Use more workers, or make that stage cheaper.",
                100 * times.waiting_share(),
                summary(self._reader.times, times)["bottleneck"],
            )

    def break_off(self, why: str = "") -> None:
        """End this pass. Batches that were read ahead are dropped without waiting for them.

        Args:
            why: message of the PassError that the iterator raises if it is asked for another batch.
        """
        self._end_message = self._end_message or why
        self._reader.is_unusable = True
        self._reader.abandon(self._pending)
        self._pending.clear()
        self._reader.is_unusable = False

    def end(self, why: str) -> None:
        """End this pass together with its workers; their tasks and slots are not used again."""
        self._end_message = self._end_message or why
