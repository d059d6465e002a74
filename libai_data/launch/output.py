"""The output of processes: forwarded at once, also to an output that may block, and kept for error messages."""

from __future__ import annotations

import fcntl
import os
import select
import selectors
import signal
import termios
import threading
import time
from collections import deque
from contextlib import suppress
from math import inf
from typing import Callable

from libai_data.launch.signals import signals_blocked

_MOST_WAITING = 1 << 20
_PIECE = 4096
SECONDS_UNTIL_STUCK = 10.0
_SECONDS_TO_END = 30.0
_SECONDS_TO_END_IF_TOLD = 1.0
_REMEMBERED_BYTES = 16384
_REMEMBERED_LINES = 40
_CHUNK = 65536
_SECONDS_TO_EMPTY = 1.0
_SECONDS_FOR_A_LINE = 0.1

Sink = Callable[[str, bytes], None]


class Output:
    """Passes bytes on to a descriptor by a thread.

    If the other side reads slowly, `has_room` tells the caller to wait. If the other side reads nothing for 10 s
    (Ctrl-S, a pager), at most 1 MiB is kept and further lines are dropped. When the other side reads again, the number
    of dropped lines is written.
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

        If the output is a terminal, wait until the terminal reads. Otherwise wait for at most 30 s without any reading,
        or less if the job must end.
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
        with signals_blocked(signal.valid_signals()):
            self._thread.start()

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


def write_to_stderr(name: str, chunk: bytes) -> None:
    """Write bytes to this process's stderr."""
    STDERR.write(chunk)


class LastWords:
    """The pipes that processes write into. The caller of `pump` reads them; no other thread does.

    Args:
        sink: called with whole lines and the name of their writer. The beginning of a line follows after 0.1 s.
        terminals: if the launcher's output is a terminal, use pseudo-terminals, so that progress bars work.
    """

    def __init__(self, sink: Sink = write_to_stderr, terminals: bool = False) -> None:
        self._sink = sink
        self._terminals = terminals
        self._selector = selectors.DefaultSelector()
        self._said: dict[str, bytes] = {}
        self._held: dict[int, tuple[float, bytes]] = {}
        """Of each descriptor, the beginning of a line: `print` writes the end of its line by itself."""
        self.last_writer: str | None = None

    def open(self, name: str) -> int:
        """Return a descriptor for a process to write into; close it here once the process has it."""
        reader, writer = self._pair(2)
        self.watch(name, reader)
        return writer

    def open_stdout(self) -> int:
        """Return a descriptor for a process's stdout: what it writes goes to ours, and is not remembered."""
        reader, writer = self._pair(1)
        self._selector.register(reader, selectors.EVENT_READ, None)
        return writer

    def _pair(self, own: int) -> tuple[int, int]:
        if not self._terminals or not os.isatty(own):
            return os.pipe()
        reader, writer = os.openpty()
        _pass_through(writer, own)
        return reader, writer

    def watch(self, name: str, reader: int) -> None:
        """Read this descriptor, and close it at its end."""
        self._said[name] = b""
        self._selector.register(reader, selectors.EVENT_READ, name)

    def pump(self, seconds: float) -> bool:
        """Pass on output that arrives within so many seconds. Return at the first piece, or if all pipes are closed.

        False if nothing came, nor may come once our own output is read.
        """
        if not (STDOUT.has_room() and STDERR.has_room()):
            time.sleep(seconds)
            return True
        if not self._selector.get_map():
            time.sleep(seconds)
            return False
        ready = self._selector.select(min(seconds, _SECONDS_FOR_A_LINE) if self._held else seconds)
        for key, _ in ready:
            try:
                chunk = os.read(key.fd, _CHUNK)
            except OSError:  # A pseudo-terminal that everybody has closed.
                chunk = b""
            if not chunk:
                self._close(key)
                continue
            if key.data is not None:
                self.last_writer = key.data
                self._said[key.data] = (self._said[key.data] + chunk)[-_REMEMBERED_BYTES:]
            since, begun = self._held.pop(key.fd, (time.monotonic(), b""))
            chunk = begun + chunk
            end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
            if end < len(chunk) <= _CHUNK:
                self._held[key.fd] = (time.monotonic() if end else since, chunk[end:])
                chunk = chunk[:end]
            self._pass_on(key.data, chunk)
        for key in list(self._selector.get_map().values()):
            since, begun = self._held.get(key.fd, (inf, b""))
            if time.monotonic() - since > _SECONDS_FOR_A_LINE:
                del self._held[key.fd]
                self._pass_on(key.data, begun)
        return bool(ready)

    def _pass_on(self, name: str | None, chunk: bytes) -> None:
        if chunk and name is None:
            STDOUT.write(chunk)
        elif chunk:
            self._sink(name, chunk)  # type: ignore[arg-type]

    def _close(self, key: selectors.SelectorKey) -> None:
        self._pass_on(key.data, self._held.pop(key.fd, (0.0, b""))[1])
        self._selector.unregister(key.fd)
        os.close(key.fd)

    def empty(self) -> None:
        """Pass on the last output of ended processes, and close all pipes, also if another process keeps them open."""
        deadline = time.monotonic() + _SECONDS_TO_EMPTY
        while self._selector.get_map() and (self.pump(0.05) or time.monotonic() < deadline):
            pass
        for key in list(self._selector.get_map().values()):
            self._close(key)

    def of(self, name: str) -> list[str]:
        """The last lines of a process."""
        return last_lines(self._said.get(name, b""))


def last_lines(written: bytes) -> list[str]:
    """The last lines of what was written, empty ones at the end left out."""
    return written[-_REMEMBERED_BYTES:].decode(errors="replace").rstrip().splitlines()[-_REMEMBERED_LINES:]


def quoted(lines: list[str]) -> str:
    """Lines as a block that cannot be taken for what is written now."""
    return "".join(f"  | {line}\n" for line in lines)


def say(message: str) -> None:
    """A line of the launcher itself."""
    STDERR.write(f"libai_data.launch: {message}\n".encode())


def _pass_through(terminal: int, own: int) -> None:
    """Have a pseudo-terminal change nothing, and be as wide as our own."""
    attributes = termios.tcgetattr(terminal)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(terminal, termios.TCSANOW, attributes)
    with suppress(OSError):
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, fcntl.ioctl(own, termios.TIOCGWINSZ, bytes(8)))
