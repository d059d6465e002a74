"""One pass over a stream: batches are sent out ahead, in order, and handed out in order."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

from libai_data.loader.batches import BatchReader, PendingBatch, ReadyBatch
from libai_data.loader.timing import LoaderTimes, summary

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_HINTS = 60.0
_WAITING_WORTH_A_HINT = 0.1


class Iteration:
    """Iterates over the batches of a stream from where it stands.

    Args:
        stream: the sampler; its position follows the batches that are taken.
        reader: reads them.
        ahead: batches to read ahead of the one asked for.
        times: where waiting is counted.
    """

    def __init__(self, stream: Any, reader: BatchReader, ahead: int, times: LoaderTimes) -> None:
        self._stream = stream
        self._reader = reader
        self._ahead = ahead
        self._times = times
        self._plan = stream.batches(stream.position)
        self._pending: deque[PendingBatch] = deque()
        self._over = False
        self._handed_out: float | None = None
        self._next_hint = time.perf_counter() + _SECONDS_BETWEEN_HINTS

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> ReadyBatch:
        if self._over:
            raise StopIteration
        asked = time.perf_counter()
        try:
            batch = self._next()
        except BaseException as error:
            self._fail(error)
            raise
        if batch is None:
            self._over = True
            self._stream.position = 0
            raise StopIteration
        self._count(asked)
        return batch

    def _next(self) -> ReadyBatch | None:
        self._send_out()
        if not self._pending:
            return None
        batch = self._reader.finish(self._pending[0])
        index_batch = self._pending.popleft().index_batch
        self._stream.position = index_batch.position + index_batch.size
        return batch

    def _fail(self, error: BaseException) -> None:
        """End this pass over an error: a batch's own, after which the workers go on, or one that came in between."""
        if self._pending and error is self._pending[0].error:
            self.break_off()
            return
        # A Ctrl-C may come between any two lines, so that some task or slot is in nobody's books.
        self._reader.is_torn = True
        self.end()

    def next_if_ready(self) -> ReadyBatch | None:
        """The next batch if it has been read by now; nothing is waited for."""
        if self._over or not self._pending:
            return None
        try:
            is_done = self._reader.is_done(self._pending[0])
        except BaseException as error:
            self._fail(error)
            raise
        return next(self) if is_done else None

    def _send_out(self) -> None:
        while len(self._pending) <= self._ahead:
            index_batch = next(self._plan, None)
            if index_batch is None:
                return
            self._pending.append(self._reader.submit(index_batch))

    def _count(self, asked: float) -> None:
        now, times = time.perf_counter(), self._times
        if self._handed_out is not None:
            times.waiting += now - asked
            times.between += asked - self._handed_out
        times.batches += 1
        self._handed_out = now
        if now > self._next_hint:
            self._next_hint = now + _SECONDS_BETWEEN_HINTS
            if times.waiting_share() > _WAITING_WORTH_A_HINT:
                logger.info(
                    "The trainer has waited for data %.0f %% of the time; most of a worker's time goes into '%s' (see "
                    "loader.stats()). Use more workers, or make that stage cheaper.",
                    100 * times.waiting_share(),
                    summary(self._reader.times, times)["bottleneck"],
                )

    def break_off(self) -> None:
        """End this pass; what was read ahead is given up, without waiting for it, and read again by the next one."""
        self._over = True
        while self._pending:
            self._reader.abandon(self._pending.popleft())

    def end(self) -> None:
        """End this pass at once, with the workers, whose slots are not used again."""
        self._over = True
        self._pending.clear()
