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
    """One process sets the event. Another process, with its `descriptor`, waits by polling, and then clears the event.

    It is an eventfd (Linux, eventfd(2)). A pipe or a socket would be slower: Linux assumes that its writer is about to
    wait, and runs the woken process on the writer's core.
    """

    _descriptor = _process = -1

    def __init__(self, descriptor: int = -1) -> None:
        # Only the process that made the event closes it. In a fork, the number may belong to another file.
        self._process = os.getpid() if descriptor < 0 else -1
        # Python has os.eventfd from 3.10 on.
        self._descriptor = descriptor if descriptor >= 0 else _libc.eventfd(0, os.O_CLOEXEC | os.O_NONBLOCK)
        if self._descriptor < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot make an event: {os.strerror(number)}")

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the interpreter, `os` may be gone already, and the system closes all descriptors.
        if not is_finalizing() and self._process == os.getpid():
            self.close()

    def fileno(self) -> int:
        """Descriptor, for polling; readable while the event is set."""
        return self._descriptor

    def set(self) -> None:
        """Wake the process that waits, or that will wait next."""
        with suppress(BlockingIOError):
            os.write(self._descriptor, _SET)

    def clear(self) -> None:
        """Clear the event, if it is set."""
        with suppress(BlockingIOError):
            os.read(self._descriptor, 8)

    def close(self) -> None:
        """Close the descriptor."""
        if self._descriptor >= 0:
            # In one line, so that no interrupt leaves it open or lets it be closed twice. Then the class's -1 applies.
            os.close(vars(self).pop("_descriptor"))
