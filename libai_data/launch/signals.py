"""Blocks signals for a short time."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def signals_blocked(signals: Iterable[int]) -> Iterator[None]:
    """Block signals to this thread within the `with` block; afterwards the earlier signal mask is restored."""
    # Read the mask first: the call that blocks signals may raise the exception of a signal that came just before.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
