"""Passes on what processes write, as it comes, and remembers the last of each."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import termios
import time
from typing import Callable

from libai_data.launch.output import STDERR, STDOUT

_REMEMBERED_BYTES = 16384
_REMEMBERED_LINES = 40
_CHUNK = 65536
_SECONDS_TO_EMPTY = 1.0

Sink = Callable[[str, bytes], None]


def write_to_stderr(name: str, chunk: bytes) -> None:
    """Write bytes to this process's stderr."""
    STDERR.write(chunk)


class LastWords:
    """The pipes that processes write into, read by whoever calls `pump`; nothing is read by another thread.

    Args:
        sink: is given each piece with the name of its writer, as it comes.
        terminals: where our own output is a terminal, hand out pseudo-terminals for pipes, so that a live progress bar
            stays one.
    """

    def __init__(self, sink: Sink = write_to_stderr, terminals: bool = False) -> None:
        self._sink = sink
        self._terminals = terminals
        self._selector = selectors.DefaultSelector()
        self._said: dict[str, bytes] = {}
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
        """Pass on what comes within so many seconds; returns at the first piece, or at once if all have closed.

        Returns:
            Whether anything came, or may come once our own output is read.
        """
        if not (STDOUT.has_room() and STDERR.has_room()):
            time.sleep(seconds)
            return True
        if not self._selector.get_map():
            time.sleep(seconds)
            return False
        ready = self._selector.select(seconds)
        for key, _ in ready:
            try:
                chunk = os.read(key.fd, _CHUNK)
            except OSError:  # A pseudo-terminal that everybody has closed.
                chunk = b""
            if not chunk:
                self._selector.unregister(key.fd)
                os.close(key.fd)
                continue
            name = key.data
            if name is None:
                STDOUT.write(chunk)
                continue
            self.last_writer = name
            self._said[name] = (self._said[name] + chunk)[-_REMEMBERED_BYTES:]
            self._sink(name, chunk)
        return bool(ready)

    def empty(self) -> None:
        """Pass on what is left of processes that have ended, and close all pipes, also what somebody holds."""
        deadline = time.monotonic() + _SECONDS_TO_EMPTY
        while self._selector.get_map() and (self.pump(0.05) or time.monotonic() < deadline):
            pass
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fd)
            os.close(key.fd)

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
    with contextlib.suppress(OSError):
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, fcntl.ioctl(own, termios.TIOCGWINSZ, bytes(8)))
