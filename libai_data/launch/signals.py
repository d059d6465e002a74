"""Signals that must wait."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def signals_blocked(signals: Iterable[int]) -> Iterator[None]:
    """Within the block, these signals to this thread wait; what was blocked before stays so after it."""
    # Known before any is blocked: one that came just before is raised as an exception by the call that blocks it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
