"""Blocks signals for a short time, and ends groups of processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# How long the last processes of a group may take to end by themselves.
_SECONDS_TO_CLEAN_UP = 2.0


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


def end_groups(groups: Collection[int]) -> None:
    """Kill what is left of process groups whose main processes have ended.

    It has a moment to end by itself: the tracker of `multiprocessing` removes shared memory that other processes have
    left, but not before they have ended.
    """
    deadline = time.monotonic() + _SECONDS_TO_CLEAN_UP
    while any(map(_still_runs, groups)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _still_runs(group: int) -> bool:
    """Whether the group has a process that has not ended; one that nobody has waited for yet has ended."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # It has ended meanwhile.
            state, _, of_group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]  # proc(5)
            if of_group == str(group) and state not in "ZX":
                return True
    return False
