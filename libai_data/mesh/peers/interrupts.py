"""Ctrl-C while OneFlow is imported.

A KeyboardInterrupt inside the import becomes an ImportError of the extension module, or hangs in a lock. While its
extension module is loaded, OneFlow also sets its own handler, which ends the process with code 255 without a message.

The handler of Python is set again when the load ends. A signal between these two moments, which are a few percent of
the import apart, ends the process. Blocking SIGINT in this thread would not help: the system then gives the signal to
another thread, such as one of numpy's, where OneFlow's handler calls `exit` while this thread runs. The process aborts.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def keeping_interrupt_handler() -> Iterator[None]:
    """If the block replaces Python's handler of SIGINT, restore the handler at the end of the block."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGINT, handler)


@contextmanager
def deferring_interrupts() -> Iterator[None]:
    """If SIGINT arrives in the block, call Python's handler at the end of the block."""
    handler = signal.getsignal(signal.SIGINT)
    interrupts: list[tuple[int, FrameType | None]] = []
    try:
        with keeping_interrupt_handler():
            if threading.current_thread() is threading.main_thread() and callable(handler):
                signal.signal(signal.SIGINT, lambda *interrupt: interrupts.append(interrupt))
            yield
    finally:
        if callable(handler) and interrupts:
            handler(*interrupts[0])
