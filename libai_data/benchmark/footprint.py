"""Footprint: memory and descriptors of processes, as Linux counts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

MEGABYTE = 1e6


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
