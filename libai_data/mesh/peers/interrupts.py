"""Ctrl-C while OneFlow is imported.

A KeyboardInterrupt inside the import becomes an ImportError of the extension module, or hangs in a lock. OneFlow also
replaces the handler, as its extension module is loaded, by one that ends the process with code 255 without a word.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def keeping_interrupt_handler() -> Iterator[None]:
    """Put Python's handler of SIGINT back at the end of the block, if the block replaced it."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGINT, handler)


@contextmanager
def deferring_interrupts() -> Iterator[None]:
    """Call Python's handler of SIGINT at the end of the block, if a signal came in the block."""
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
