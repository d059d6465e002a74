"""What the loader's tests share: a watchdog, because a loader that hangs is what they look for."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator
from math import ceil
from types import FrameType

import numpy as np
import oneflow as flow
import pytest

from tests.deadline import Deadline
from tests.distributed.processes import catches, children_of
from tests.properties import is_long_run

SECONDS = 60

# OneFlow opens what it needs before any test counts descriptors, or pretends to be a rank of a job.
flow.from_numpy(np.zeros(1)).numpy()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", f"watchdog(seconds): the test may take this long, instead of {SECONDS} s (slow: 5 times)"
    )


@pytest.fixture(autouse=True)
def watchdog(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that hangs, after showing where each of its threads is."""
    marker = request.node.get_closest_marker("watchdog")
    is_slow = request.node.get_closest_marker("slow") is not None or is_long_run()
    seconds = marker.args[0] if marker else SECONDS * (5 if is_slow else 1)
    deadline = Deadline(seconds)

    def set_alarm() -> None:
        left = max(1, ceil(deadline.seconds_left))
        signal.alarm(left)
        # Where no Python code runs any more, the whole session ends.
        faulthandler.dump_traceback_later(left + 20, exit=True)

    def bark(number: int, frame: FrameType | None) -> None:
        if not deadline.has_passed:  # The machine has become busier.
            set_alarm()
            return
        faulthandler.dump_traceback(file=2, all_threads=True)
        for child in children_of(os.getpid()):
            if catches(child, signal.SIGUSR1):
                os.kill(child, signal.SIGUSR1)  # A worker prints its stacks; its loader passes them on when it ends.
        # No OSError, such as TimeoutError, which the code under test may expect.
        pytest.fail(f"the test has not ended within {seconds} s; the stacks are in stderr")

    before = signal.signal(signal.SIGALRM, bark)
    set_alarm()
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
