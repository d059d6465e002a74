"""Disturbance: how much of the processor cores in use others take while something is measured."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

# Of a line of /proc/stat: all but idle and iowait, and guests, which count as user time already.
_BUSY_COLUMNS = (1, 2, 3, 6, 7, 8)


class Onlooker:
    """Watches the cores from one call to the next."""

    def __init__(self) -> None:
        self._last = self._now()

    def others(self) -> float:
        """Share of the cores' time that other processes took since the last call, 0 to 1."""
        now = self._now()
        elapsed, busy, own = (after - before for before, after in zip(self._last, now))
        self._last = now
        available = elapsed * len(os.sched_getaffinity(0))
        return min(1.0, max(0.0, (busy - own) / available)) if available > 0 else 0.0

    @staticmethod
    def _now() -> tuple[float, float, float]:
        return time.perf_counter(), _busy_seconds(), _own_seconds()


def descendants() -> list[int]:
    """Process ids of all processes below this one."""
    children: dict[int, list[int]] = {}
    for pid, fields in _all_stats():
        children.setdefault(int(fields[1]), []).append(pid)
    found, left = [], [os.getpid()]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return sorted(found)


def _busy_seconds() -> float:
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    return sum(int(line[column]) for line in lines if line[0] in names for column in _BUSY_COLUMNS) / _ticks()


def _own_seconds() -> float:
    """Seconds of this process, of its descendants, and of those that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    below = set(descendants())
    alive = sum(int(fields[11]) + int(fields[12]) for pid, fields in _all_stats() if pid in below)
    return time.process_time() + ended.ru_utime + ended.ru_stime + alive / _ticks()


def _all_stats() -> list[tuple[int, list[str]]]:
    """Process ids, and the fields of /proc/PID/stat from the state on."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold anything.
            found.append((int(path.parent.name), path.read_text().rpartition(")")[2].split()))
        except OSError:  # It ended meanwhile.
            continue
    return found


def _ticks() -> int:
    return os.sysconf("SC_CLK_TCK")
