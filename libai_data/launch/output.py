"""Writing to a terminal, pipe or file that may stop taking bytes, without waiting for it."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Callable

_MOST_WAITING = 1 << 20
_PIECE = 4096
SECONDS_UNTIL_STUCK = 10.0
_SECONDS_TO_END = 30.0
_SECONDS_TO_END_IF_TOLD = 1.0


class Output:
    """Passes bytes on to a descriptor by a thread.

    While the other side reads slowly, `has_room` tells the caller to wait. If the other side reads nothing for 10 s
    (Ctrl-S, a pager), it is stuck: what no longer fits into 1 MiB is left out, and the number of lines is written once
    the other side reads again.

    Args:
        descriptor: where to write.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._left_out = 0
        self._progress = 0.0
        self._thread: threading.Thread | None = None

    def write(self, chunk: bytes) -> None:
        """Hand over bytes; for any thread."""
        with self._changed:
            if self._thread is None:
                self._start()
            if not self._size:
                self._progress = time.monotonic()
            if self._size >= _MOST_WAITING and self._is_stuck():
                self._left_out += chunk.count(b"\n")
                return
            if self._left_out:
                chunk = b"\nlibai_data.launch: %d line(s) left out: nobody read them\n" % self._left_out + chunk
                self._left_out = 0
            self._waiting.append(chunk)
            self._size += len(chunk)
            self._changed.notify_all()

    def has_room(self) -> bool:
        """Whether to hand over more, rather than let the other side catch up."""
        return self._size < _MOST_WAITING or self._is_stuck()

    def flush(self, is_told_to_end: Callable[[], bool] = lambda: False) -> None:
        """Wait until all is written.

        A terminal is waited for until it reads, since somebody sits there; anything else for 30 s in which it reads
        nothing, and less if the job was told to end.
        """
        start = time.monotonic()
        with self._changed:
            while self._size:
                silent = time.monotonic() - max(start, self._progress)
                if is_told_to_end():
                    limit = _SECONDS_TO_END_IF_TOLD
                else:
                    limit = float("inf") if os.isatty(self._descriptor) else _SECONDS_TO_END
                if silent > limit:
                    return
                self._changed.wait(0.05)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        # Signals are for the main thread, which blocks them at times.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _is_stuck(self) -> bool:
        return time.monotonic() - self._progress > SECONDS_UNTIL_STUCK

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                chunk = self._waiting.popleft()
            for start in range(0, len(chunk), _PIECE):
                piece = chunk[start : start + _PIECE]
                self._write_piece(piece)
                with self._changed:
                    self._size -= len(piece)
                    self._progress = time.monotonic()
                    self._changed.notify_all()

    def _write_piece(self, piece: bytes) -> None:
        """Write, or lose it where nobody can read it (a closed pipe, a full disk)."""
        with suppress(OSError):
            while piece:
                try:
                    piece = piece[os.write(self._descriptor, piece) :]
                except BlockingIOError:
                    select.select([], [self._descriptor], [])


STDOUT, STDERR = Output(1), Output(2)
"""This process's own."""
