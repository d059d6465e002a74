"""How long tests wait for what must come: longer on a busy machine, so that only a hang fails."""

from __future__ import annotations

import os
import time

_CORES = os.cpu_count() or 1


def busyness() -> float:
    """How many times as long as beside nothing but these tests something takes, by the load of the last minute."""
    return max(1.0, os.getloadavg()[0] / (2 * _CORES))


def stretched(seconds: float) -> float:
    """A time limit that a test gives to what it tests, longer on a busy machine.

    Args:
        seconds: the limit on a machine on which nothing else runs.
    """
    return seconds * busyness()


class Deadline:
    """A time limit.

    Args:
        seconds: what a machine may take on which nothing else runs.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._start = time.monotonic()

    @property
    def seconds_left(self) -> float:
        """How long to wait still, 0 at the end."""
        return max(0.0, self._start + self._seconds * busyness() - time.monotonic())

    @property
    def has_passed(self) -> bool:
        """Whether to wait no longer."""
        return self.seconds_left == 0.0
