"""How long tests wait for what must come: longer on a busy machine, so that only a hang fails."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable

_CORES = os.cpu_count() or 1


def busyness() -> float:
    """How many times as long as beside nothing but these tests something takes, by the load of the last minute, or by
    that of this moment if the load has just begun."""
    last_minute, _, _, running, _ = Path("/proc/loadavg").read_text().split()
    return max(1.0, max(float(last_minute), float(running.partition("/")[0])) / (2 * _CORES))


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


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 60) -> None:
    """Wait for something; an AssertionError names what has not come."""
    deadline = Deadline(seconds)
    while not condition():
        assert not deadline.has_passed, f"within {seconds:g} s, longer on a busy machine: no {what}"
        time.sleep(0.005)


def wait_for_a_lock(process: subprocess.Popen[Any]) -> None:
    """Wait until a process waits for a lock: what Linux lists with an arrow."""

    def waits() -> bool:
        assert process.poll() is None, f"{process.args!r} has ended, and waits for no lock"
        return any("->" in entry and f" {process.pid} " in entry for entry in open("/proc/locks"))

    wait_until(waits, "process that waits for a lock")


def printed_by(process: subprocess.Popen[Any], seconds: float = 60) -> tuple[Any, Any]:
    """Wait until a process has ended, and return what it printed since; one that does not end is killed, and named."""
    deadline = Deadline(seconds)
    while not deadline.has_passed:
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=max(1.0, deadline.seconds_left))
    process.kill()
    raise AssertionError(f"{process.args!r} has not ended within {seconds:g} s; it printed {process.communicate()}")


def run_to_end(
    command: Sequence[Any], seconds: float = 60, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and return its exit code and what it printed.

    Args:
        check: whether it is an error if the command fails.
        options: of `subprocess.Popen`.
    """
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **{**pipes, **options})
    printed, errors = printed_by(process, seconds)
    assert not (check and process.returncode), f"{command} failed with {process.returncode}: {errors}"
    return subprocess.CompletedProcess(command, process.returncode, printed, errors)
