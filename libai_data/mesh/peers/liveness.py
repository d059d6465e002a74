"""Whether all ranks are alive and still take part: a rank that fails, dies or leaves early ends the job, and is named.

A process that is a rank begins to watch as soon as it has imported OneFlow and this package, in any program; that waits
for nobody. `watchdog` tells how.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable

from libai_data.mesh.peers.node_link import seconds_to_meet
from libai_data.mesh.peers.watchdog import SECONDS_FOR_THE_CAUSE, Liveness, end_process

_liveness: Liveness | None = None
_beginning = threading.Lock()
_forked = False


def _in_forked_child() -> None:
    """A child of a rank is no rank."""
    global _liveness, _forked
    _liveness, _forked = None, "oneflow" in sys.modules


os.register_at_fork(after_in_child=_in_forked_child)


def begin_to_watch() -> Liveness | None:
    """Begin to watch over the other ranks, once a process; None while OneFlow is not imported. Waits for nobody.

    From now on an exception that nobody catches ends this process at once, and it takes leave of the others when it
    ends in any other way.
    """
    global _liveness
    if _liveness is not None or "oneflow" not in sys.modules or _forked:
        return _liveness
    import oneflow as flow

    with _beginning:
        if _liveness is None:
            rank, world_size = flow.env.get_rank(), flow.env.get_world_size()
            _liveness = Liveness(rank, world_size, flow.env.get_node_size(), flow.cuda.is_available())
            if world_size > 1:
                atexit.register(say_farewell)
                sys.excepthook = partial(_end_after, sys.excepthook, rank)
    return _liveness


def begin_collective() -> None:
    """Say, at the start of each collective of this package, that this rank begins it.

    Raises:
        PeerError: Another rank has left, and will not come to it.
        MeshError: In the first one: the ranks belong to two jobs, or two nodes run on one machine.
    """
    liveness = begin_to_watch()
    if liveness is not None:
        liveness.begin_collective()


def watch_over_ranks() -> Liveness:
    """Meet the other ranks, within `seconds_to_meet()`. Collective, the first time.

    Raises:
        PeerError: Some do not come in time; they are named.
        MeshError: The ranks belong to two jobs, or two nodes run on one machine.
    """
    import oneflow as flow

    liveness = begin_to_watch()
    assert liveness is not None  # OneFlow is imported
    if flow.env.get_world_size() > 1:
        with _ending_unless_all_come(flow.env.get_rank()):
            liveness.meet()
    return liveness


def _end_after(print_exception: Callable[..., Any], rank: int, *exception: Any) -> None:
    print_exception(*exception)
    if not _forked:
        end_process(1, f"rank {rank} ends: see the exception above")


def say_farewell() -> None:
    """Let the other ranks know that this one ends; the process does so by itself when it exits."""
    global _liveness
    if _liveness is not None:
        _liveness.farewell()
        if _liveness._world_size == 1:
            _liveness = None


@contextmanager
def _ending_unless_all_come(rank: int) -> Iterator[None]:
    """End this process if the block, in which all ranks must meet, takes too long; it may wait in a collective."""
    seconds = seconds_to_meet()
    message = f"rank {rank} ends: the other ranks have not all come within {seconds:g} s; do they run the same program?"
    # A rank that waits for connections says who is missing, and is to say it first.
    timer = threading.Timer(seconds + SECONDS_FOR_THE_CAUSE, end_process, (1, message))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
