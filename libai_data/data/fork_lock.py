"""What a fork of a process must not share with it: locks that another thread held, and the work of a reader."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from typing import Any

_RLock: Any = type(threading.RLock())
# Not a WeakSet: its references have callbacks, and CPython 3.10 frees an RLock twice if a callback collects garbage.
_locks: set[weakref.ref[ForkLock]] = set()


class ForkLock(_RLock):
    """An `RLock` that is free in a fork, even if another thread of the parent held it, which the fork does not have."""

    # `with` is inherited from RLock, so no interrupt can come between acquiring the lock and entering the block.
    def __init__(self) -> None:
        super().__init__()
        _locks.difference_update([each for each in list(_locks) if each() is None])
        _locks.add(weakref.ref(self))


def _after_fork() -> None:
    for lock in [each() for each in _locks]:
        if lock is None:
            continue
        if lock.acquire(blocking=False):  # It was free, or held by the thread that forked, which continues in the fork.
            lock.release()
        else:
            lock._at_fork_reinit()


def end_if_fork_of(process: int) -> None:
    """End this process if it is a fork of a reader that a user's code made and let return: both would do its tasks."""
    if os.getpid() != process:
        end_fork()


def end_fork() -> None:
    """End this process, a fork of a reader that a user's code made and let return."""
    with suppress(OSError):
        os.write(
            2,
            b"A forked process ends: the dataset, or other code that the loader called, forked it, and the child "
            b"returned to the loader. End such a child in the code that forks it, with os._exit(0)\n",
        )
    os._exit(1)


os.register_at_fork(after_in_child=_after_fork)
