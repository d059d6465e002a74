"""Threads that read, in the background."""

from __future__ import annotations

import sys
import threading
from queue import SimpleQueue
from typing import Any, Callable


class DaemonThread(threading.Thread):
    """A daemon thread whose start a Ctrl-C may interrupt at any moment: the thread then runs, or never begins.

    `Thread.start` waits for an `Event`. If a Ctrl-C leaves the lock of this event locked, the new thread never begins.
    """

    def __init__(self, target: Callable[..., Any], args: tuple[Any, ...], name: str) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._started = _Started()

    def start(self) -> None:
        """Start the thread; raises a RuntimeError while Python ends, when no thread can run and the wait would hang."""
        if sys.is_finalizing():
            raise RuntimeError(f"the thread {self.name!r} cannot start while the program ends; read the loader before")
        super().start()


class _Started(threading.Event):
    def __init__(self) -> None:
        super().__init__()
        self._is_set = False
        self._messages: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._messages.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the new thread. Only the thread that starts it waits."""
        self._messages.get(timeout=timeout)
        return True
