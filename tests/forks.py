"""Processes that are forked from the one that tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def a_fork_that_lives_on() -> Iterator[None]:
    """Within the block there is a process forked from this one, that does nothing."""
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
