"""Blocks signals for a short time, and ends groups of processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# How long the last processes of a group may take to end by themselves, and the trackers of their shared memory.
_SECONDS_TO_END, _SECONDS_TO_CLEAN_UP = 2.0, 10.0
_TRACKER = b"multiprocessing.resource_tracker"


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

    It has a moment to end by itself. The trackers of `multiprocessing` have longer: they remove shared memory that
    other processes have left, but not before these have ended.
    """
    start = time.monotonic()
    while running := _running(groups):
        waited = time.monotonic() - start
        if waited > _SECONDS_TO_CLEAN_UP:
            break
        for pid in running if waited > _SECONDS_TO_END else ():
            with suppress(OSError):  # It has ended meanwhile.
                if _TRACKER not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _running(groups: Collection[int]) -> list[int]:
    """Processes of the groups that have not ended; one that nobody has waited for yet has ended."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # It has ended meanwhile.
            stat = (process / "stat").read_text(errors="replace")
            state, _, group = stat.rpartition(")")[2].split()[:3]  # proc(5)
            if int(group) in groups and state not in "ZX":
                found.append(int(process.name))
    return found
