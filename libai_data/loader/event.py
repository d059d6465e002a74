"""An event that one process sets and another waits for."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from typing import Callable

_libc = ctypes.CDLL(None, use_errno=True)
_SET = (1).to_bytes(8, "little")


class Event:
    """Set by one process, waited for by another in a poll of its descriptor, and cleared by that one.

    It is an eventfd (Linux, eventfd(2)). Through a pipe or a socket the same would take longer: the system takes the
    writer of these for one that is about to wait, and lets the woken process run in its place, on its core.

    Args:
        descriptor: of an event that another process made; by default a new one is made.
    """

    _descriptor = _process = -1

    def __init__(self, descriptor: int = -1) -> None:
        # It is closed by whoever made it, and not by a fork, in which the number may be that of another file.
        self._process = os.getpid() if descriptor < 0 else -1
        # Python has os.eventfd from 3.10 on.
        self._descriptor = descriptor if descriptor >= 0 else _libc.eventfd(0, os.O_CLOEXEC | os.O_NONBLOCK)
        if self._descriptor < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot make an event: {os.strerror(number)}")

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # When the interpreter ends, it has taken `os` apart, and the system closes everything.
        if not is_finalizing() and self._process == os.getpid():
            self.close()

    def fileno(self) -> int:
        """Descriptor, for polling; readable while the event is set."""
        return self._descriptor

    def set(self) -> None:
        """Wake whoever waits, or whoever will."""
        with suppress(BlockingIOError):
            os.write(self._descriptor, _SET)

    def clear(self) -> None:
        """Take note of the event, if it is set."""
        with suppress(BlockingIOError):
            os.read(self._descriptor, 8)

    def close(self) -> None:
        """Close the descriptor."""
        if self._descriptor >= 0:
            # In one line, so that no interrupt leaves it open, or has it closed twice; the class has -1.
            os.close(vars(self).pop("_descriptor"))
