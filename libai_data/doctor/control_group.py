"""Limits that a container or a batch system has set for this process's control group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def limit_left(controller: str, limit: str, used: str, legacy_limit: str, legacy_used: str) -> int | None:
    """How much of a limit is left; None without one.

    Linux's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/ describe the files.

    Args:
        controller: such as "memory".
        limit: name of the file that holds the limit, in version 2.
        used: of the file that holds what is used.
        legacy_limit: the first, in version 1.
        legacy_used: the second.
    """
    left = [
        most - taken
        for folder in _folders(controller)
        for names in ((limit, used), (legacy_limit, legacy_used))
        if (most := _number(folder / names[0])) is not None and (taken := _number(folder / names[1])) is not None
    ]
    return min(left, default=None)


def _folders(controller: str) -> Iterator[Path]:
    """Folders of this process's group and all above it, as far as they can be seen from here."""
    yield from (_ROOT, _ROOT / controller)
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        folder = (_ROOT / controller if controllers else _ROOT) / path.lstrip("/")
        yield from (each for each in (folder, *folder.parents) if _ROOT in each.parents)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit
