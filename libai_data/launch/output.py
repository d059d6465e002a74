"""Forwards the output of processes at once, without blocking, and keeps the last lines for error messages."""

from __future__ import annotations

import fcntl
import os
import select
import selectors
import signal
import termios
import threading
import time
from collections import defaultdict, deque
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
    """Writes bytes to a descriptor in a thread.

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
        self._unfinished: str | None = None  # who wrote a line without its end last
        self._progress = 0.0
        self._thread: threading.Thread | None = None

    def write(self, chunk: bytes, writer: str = "") -> None:
        """Queue bytes to be written; may be called from any thread. No writer continues the line of another one."""
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
            elif self._unfinished not in (None, writer):
                chunk = b"\n" + chunk
            line = chunk[chunk.rfind(b"\n") + 1 :]
            # A progress bar overwrites its line.
            self._unfinished = writer if line and b"\r" not in line else None
            self._waiting.append(chunk)
            self._size += len(chunk)
            self._changed.notify_all()

    def has_room(self) -> bool:
        """Whether the caller may write more; False if the caller should wait until the other side has read."""
        return self._size < _MOST_WAITING or self._is_stuck()

    def flush(self, is_told_to_end: Callable[[], bool] = lambda: False) -> None:
        """Wait until all bytes are written.

        If the output is a terminal, there is no time limit. Otherwise the wait ends if the other side reads nothing for
        30 s. If the job must end, the limit is 1 s.
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
        # Only the main thread may receive signals, because it blocks them at times.
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
        """Write bytes, or drop them if the output does not accept them (a closed pipe, a full disk)."""
        with suppress(OSError):
            while piece:
                try:
                    piece = piece[os.write(self._descriptor, piece) :]
                except BlockingIOError:
                    select.select([], [self._descriptor], [])


STDOUT, STDERR = Output(1), Output(2)
"""The stdout and stderr of this process."""


def write_to_stderr(name: str, chunk: bytes) -> None:
    """Write the bytes of a process to this process's stderr."""
    STDERR.write(chunk, name)


class OutputPipes:
    """The pipes to which processes write. Only the caller of `pump` reads these pipes.

    Args:
        sink: called with the name of the writer and whole lines. An unfinished line is passed on after 0.1 s.
        terminals: if the launcher's output is a terminal, use pseudo-terminals, so that progress bars work.
    """

    def __init__(self, sink: Sink = write_to_stderr, terminals: bool = False) -> None:
        self._sink = sink
        self._terminals = terminals
        self._selector = selectors.DefaultSelector()
        self._said: defaultdict[str, bytes] = defaultdict(bytes)
        self._held: dict[int, tuple[float, bytes]] = {}
        """Descriptor -> (time, an unfinished line), because `print` writes the end of a line separately."""
        self.last_writer: str | None = None

    def open(self, name: str | None) -> int:
        """Return a descriptor for the output of a process; the caller closes it after the process has started.

        Without a name, the output is forwarded to our stdout and not kept.
        """
        reader, writer = self._pair(1 if name is None else 2)
        self.watch(name, reader)
        return writer

    def _pair(self, own: int) -> tuple[int, int]:
        if not self._terminals or not os.isatty(own):
            return os.pipe()
        reader, writer = os.openpty()
        _pass_through(writer, own)
        return reader, writer

    def watch(self, name: str | None, reader: int) -> None:
        """Read this descriptor, and close it when its writer has closed the other end."""
        self._selector.register(reader, selectors.EVENT_READ, name)

    def pump(self, seconds: float) -> bool:
        """Pass on the first output that arrives within `seconds`.

        Returns False if no output arrived. True also means that our own output must be read first.
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
            except OSError:  # A pseudo-terminal that all its writers have closed.
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
            self._pass_on(key, chunk)
        for key in list(self._selector.get_map().values()):
            since, begun = self._held.get(key.fd, (inf, b""))
            if time.monotonic() - since > _SECONDS_FOR_A_LINE:
                del self._held[key.fd]
                self._pass_on(key, begun)
        return bool(ready)

    def _pass_on(self, key: selectors.SelectorKey, chunk: bytes) -> None:
        if chunk and key.data is None:
            STDOUT.write(chunk, str(key.fd))
        elif chunk:
            self._sink(key.data, chunk)

    def _close(self, key: selectors.SelectorKey) -> None:
        self._pass_on(key, self._held.pop(key.fd, (0.0, b""))[1])
        self._selector.unregister(key.fd)
        os.close(key.fd)

    def empty(self) -> None:
        """Pass on the last output of ended processes, and close all pipes, even if another process has them open."""
        deadline = time.monotonic() + _SECONDS_TO_EMPTY
        while self._selector.get_map() and (self.pump(0.05) or time.monotonic() < deadline):
            pass
        for key in list(self._selector.get_map().values()):
            self._close(key)

    def of(self, name: str) -> list[str]:
        """The last lines of a process, without empty lines at the end."""
        said = self._said[name].decode(errors="replace")
        return said.rstrip().splitlines()[-_REMEMBERED_LINES:]


def quoted(lines: list[str]) -> str:
    """Lines as a block, marked so that nobody mistakes them for new output."""
    return "".join(f"  | {line}\n" for line in lines)


def say(message: str) -> None:
    """Write a line of the launcher itself to stderr."""
    STDERR.write(f"libai_data.launch: {message}\n".encode())


def _pass_through(terminal: int, own: int) -> None:
    """Set up a pseudo-terminal that does not change the output, and is as wide as our own terminal."""
    attributes = termios.tcgetattr(terminal)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(terminal, termios.TCSANOW, attributes)
    with suppress(OSError):
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, fcntl.ioctl(own, termios.TIOCGWINSZ, bytes(8)))
