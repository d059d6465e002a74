"""Measures the time of transforms, which is not part of the time of reading."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class _Running(threading.local):
    transform = 0.0


_running = _Running()


@contextmanager
def transform_time() -> Iterator[None]:
    """Count the block's time as transforming, so that `loader.stats()` does not count it as reading."""
    start = time.perf_counter()
    try:
        yield
    finally:
        _running.transform += time.perf_counter() - start


def take_transform_time() -> float:
    """Seconds that this thread spent in `transform_time` since the last call."""
    seconds, _running.transform = _running.transform, 0.0
    return seconds
