"""Processes that are forked from the one that tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Callable


@contextmanager
def a_fork_that_lives_on(first: Callable[[], object] = object) -> Iterator[None]:
    """Within the block there is a process forked from this one, that does nothing more; it keeps what `first` makes."""
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            kept = first()
            os.write(tell, b"x")
            signal.pause()
            del kept
        finally:
            os._exit(0)
    os.close(tell)
    try:
        assert os.read(ready, 1) == b"x"
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
