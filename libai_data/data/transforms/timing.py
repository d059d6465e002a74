"""Measures the time of transforms, which is not part of the time of reading."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class _ThisThread(threading.local):
    transform = 0.0  # seconds in `transform_time` since they were taken last


this_thread = _ThisThread()


@contextmanager
def transform_time() -> Iterator[None]:
    """Count the block's time as transforming, so that `loader.stats()` does not count it as reading."""
    start = time.perf_counter()
    try:
        yield
    finally:
        this_thread.transform += time.perf_counter() - start


def take_transform_time() -> float:
    """Seconds that this thread spent in `transform_time` since the last call."""
    seconds = this_thread.transform
    if seconds:
        this_thread.transform = 0.0
    return seconds
