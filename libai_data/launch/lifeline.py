"""The lifeline: the system itself kills worker processes when their trainer is gone, whatever they are doing then."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
from typing import Callable


class Lifeline:
    """A pipe to which nothing is written. Its writing end is the trainer's alone, and closes with it, however it ends.

    A thread of the worker could wait for that as well, but not while code of the dataset holds the interpreter, nor
    while the worker is stopped.
    """

    descriptor = _trainers_end = _process = -1

    def __init__(self) -> None:
        self._process = os.getpid()
        self.descriptor, self._trainers_end = os.pipe2(os.O_CLOEXEC)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing() and self._process == os.getpid():  # see `Event`
            self.close()

    def let_go(self) -> None:
        """Close the trainer's end, in the trainer or in a process that it has forked."""
        descriptor, self._trainers_end = self._trainers_end, -1
        if descriptor >= 0:
            os.close(descriptor)

    def close(self) -> None:
        """Close both ends."""
        self.let_go()
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def hold_on(descriptor: int) -> None:
    """Let this process be killed when the trainer's end closes, or end it now if that has happened.

    Args:
        descriptor: of the `Lifeline`.
    """
    # Opened anew, because whom to signal is noted with the open file, which all workers would share.
    own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, os.O_ASYNC)
    gone = select.poll()
    gone.register(own, 0)
    if gone.poll(0):
        os._exit(0)
