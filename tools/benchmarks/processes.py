"""What processes use, as Linux counts it: memory, descriptors, and processor cores."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

MEGABYTE = 1e6
# Of a line of /proc/stat: all but idle and iowait, and guests, which count as user time already.
_BUSY_COLUMNS = (1, 2, 3, 6, 7, 8)
_SECONDS_OF_A_LOOK = 0.2
_CORES_AT_REST = 0.2


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
        return time.perf_counter(), _busy_seconds(), own_seconds()


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


def own_seconds() -> float:
    """Seconds of this process, of its descendants, and of those that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    below = set(descendants())
    alive = sum(int(fields[11]) + int(fields[12]) for pid, fields in _all_stats() if pid in below)
    return time.process_time() + ended.ru_utime + ended.ru_stime + alive / _ticks()


def wait_for_rest(longest: float) -> None:
    """Wait until this process and its descendants use almost no core and wait for none, at most `longest` seconds.

    After a measurement, the workers of its loader read ahead, and would slow down what is measured next.
    """
    end, used = time.perf_counter() + longest, own_seconds()
    while time.perf_counter() < end:
        time.sleep(_SECONDS_OF_A_LOOK)
        before, used = used, own_seconds()
        # On a busy machine, a process that computes may get no core.
        if used - before < _CORES_AT_REST * _SECONDS_OF_A_LOOK and not _any_is_runnable():
            return


def _any_is_runnable() -> bool:
    below = set(descendants())
    return any(fields[0] == b"R" for pid, fields in _all_stats() if pid in below)


def _all_stats() -> list[tuple[int, list[bytes]]]:
    """Process ids, and the fields of /proc/PID/stat from the state on."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            # The name, in parentheses, may hold anything, also half a character.
            found.append((int(pid), Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()))
        except OSError:  # It ended meanwhile.
            continue
    return found


def _ticks() -> int:
    return os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> float:
    """Megabytes that a process holds in memory, shared ones in proportion."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(_kilobytes(line) for line in rollup.splitlines() if line.startswith("Pss:")) * 1024 / MEGABYTE


def private_beyond(pid: int, *data: str) -> float:
    """Megabytes that only this process holds, beyond the data.

    A page of a file counts as private when just one process has touched it. So of what is mapped from the data's files,
    only the pages that the process made its own copies of are counted.

    Args:
        pid: the process.
        data: beginnings of the paths that are data.
    """
    total = 0.0
    for path, sizes in _mappings(pid):
        keys = ("Anonymous",) if path.startswith(data) else ("Private_Clean", "Private_Dirty")
        total += sum(sizes[key] for key in keys)
    return total * 1024 / MEGABYTE


def descriptors(pid: int) -> int:
    """Open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def _mappings(pid: int) -> Iterator[tuple[str, dict[str, float]]]:
    path, sizes = "", {}
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        key, _, rest = line.partition(":")
        if rest.endswith(" kB"):
            sizes[key] = _kilobytes(line)
        elif key == "VmFlags":
            yield path, sizes
            path, sizes = "", {}
        else:
            fields = line.split(maxsplit=5)
            if len(fields) >= 5 and "-" in fields[0]:
                path = fields[5] if len(fields) == 6 else ""


def _kilobytes(line: str) -> float:
    return float(line.split()[1])
