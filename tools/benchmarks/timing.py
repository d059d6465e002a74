"""How long a batch takes, and how much processor time; needs nothing but Python, as the peers' processes use it too."""

from __future__ import annotations

import time
from typing import Any, Callable

from tools.benchmarks.processes import own_seconds

BATCH = 32
_WARM_UP = 8
_LEAST_BATCHES = 8


class Cost(float):
    """Seconds of a batch.

    Args:
        seconds: as the clock counts them.
        processor: seconds of all cores that this process and those below it used.
    """

    processor: float

    def __new__(cls, seconds: float, processor: float) -> Cost:
        """A float with one more number."""
        cost = super().__new__(cls, seconds)
        cost.processor = processor
        return cost


def seconds_a_batch(
    fetch: Callable[[], Any], seconds: float, warm_up: int = _WARM_UP, least: int = _LEAST_BATCHES
) -> Cost:
    """Fetch batches, letting go of each, for some seconds.

    Args:
        fetch: gives a batch.
        seconds: for how long at least.
        warm_up: batches before; what was fetched ahead while others were measured is used up so.
        least: batches that are measured at least.
    """
    for _ in range(warm_up):
        fetch()
    used, start, batches = own_seconds(), time.perf_counter(), 0
    while True:
        fetch()
        batches += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds and batches >= least:
            return Cost(elapsed / batches, (own_seconds() - used) / batches)
