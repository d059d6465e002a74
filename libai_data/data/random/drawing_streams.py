"""Streams that threads read ahead, and that draw from the global generators meanwhile.

A thread that watches or seeds the generators restores them afterwards. This would undo the draws of such a stream, and
the stream would draw the same numbers again. So the thread first waits until no such stream is between two items.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LONGEST_WAIT = 3.0
"""Seconds for which a stream and what must not read at the same time wait for each other at most: one may hang."""

_turns: dict[int, Any] = {}
"""By thread that reads a stream that draws: the lock that it holds while it reads an item."""


def note_drawing_stream(turn: Any) -> None:
    """Note that this thread reads a stream that draws; from now on, it must hold the RLock `turn` while it reads."""
    _turns[threading.get_ident()] = turn


def forget_drawing_stream() -> None:
    """Note that this thread no longer reads a stream."""
    _turns.pop(threading.get_ident(), None)


def streams_draw() -> bool:
    """Whether other threads read streams that draw."""
    # A stream may read by a loader of its own: two threads would wait for each other.
    return bool(_turns) and threading.get_ident() not in _turns


@contextmanager
def streams_stopped() -> Iterator[None]:
    """Within the block, no other thread reads an item of a stream that draws."""
    held = []
    try:
        for turn in [*_turns.values()] if streams_draw() else ():
            if turn.acquire(timeout=LONGEST_WAIT):
                held.append(turn)
        yield
    finally:
        for turn in held:
            if turn._is_owned():
                turn.release()


def wait_for_stream(turn: Any) -> None:
    """Within `streams_stopped`, let the stream of `turn` go on: this thread is about to wait for an item of it."""
    if turn._is_owned():
        turn._release_save()


os.register_at_fork(after_in_child=_turns.clear)
