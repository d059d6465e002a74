"""Ends processes when their parent ends, even by `kill -9`: workers watch a pipe, programs get a signal.

A program that the parent's main thread starts asks the system for a signal (`die_with_main_thread`). A worker may be
started by any thread, and the end of this thread would send the signal too early. So a worker watches a pipe.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import sys
import weakref
from typing import Any, Callable

from libai_data.errors import ConfigError

_PR_SET_PDEATHSIG = 1
_DESCRIPTORS = "/proc/self/fd"
# Look the function up before any fork, because a forked child must not need the dynamic loader's lock.
_prctl = ctypes.CDLL(None).prctl

_of_this_process: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def keep_from_forks(owner: Any, close: str = "close") -> None:
    """In each forked child, close an object that only this process may have open, such as the end of a connection.

    If a worker, or another fork of the user's code, had the object open too, the other end would not notice the end of
    this process. `close` is the name of the method that closes the object.
    """
    _of_this_process[owner] = close


def _close_in_forked_child() -> None:
    for owner, close in list(_of_this_process.items()):
        getattr(owner, close)()


os.register_at_fork(after_in_child=_close_in_forked_child)


class OwnDescriptors:
    """Descriptors of this process, as attributes with these names; they are closed when nobody has the object."""

    _names: tuple[str, ...]
    _process = -1

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the interpreter, `os` may be gone already, and the system closes all descriptors. In a fork, the
        # numbers may belong to other files.
        if not is_finalizing() and self._process == os.getpid():
            self._release(*self._names)

    def _release(self, *names: str) -> None:
        for name in names:
            if vars(self).get(name, -1) >= 0:
                # One statement, so that an interrupt cannot leave the descriptor open, or close it twice.
                os.close(vars(self).pop(name))


class ParentPipe(OwnDescriptors):
    """A pipe to which nothing is written. Only the parent has the writing end, which closes when the parent ends.

    A thread that watches in the worker would not suffice: a thread cannot run while the dataset's code has the
    interpreter, or while the worker is stopped.
    """

    _names = "descriptor", "_parents_end"
    descriptor = _parents_end = -1

    def __init__(self) -> None:
        if not os.path.isdir(_DESCRIPTORS):
            raise ConfigError(
                f"processes cannot be started to read data, because this system has no {_DESCRIPTORS}; mount /proc "
                "(mount -t proc proc /proc), or read without processes: num_workers=0, or worker_type='thread'"
            )
        self._process = os.getpid()
        self.descriptor, self._parents_end = os.pipe2(os.O_CLOEXEC)
        keep_from_forks(self, "close_parents_end")

    def close_parents_end(self) -> None:
        """Close the parent's end, in the parent or in a process that it has forked."""
        self._release("_parents_end")

    def close(self) -> None:
        """Close both ends."""
        self._release(*self._names)


def die_with_parent(descriptor: int) -> None:
    """Have the system kill this process when the parent's end closes; if the end is closed already, exit now."""
    # Open the pipe again: the process to signal is a property of the open file, which all workers would share.
    own = os.open(f"{_DESCRIPTORS}/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, os.O_ASYNC)
    gone = select.poll()
    gone.register(own, 0)
    if gone.poll(0):
        os._exit(0)


def die_with_main_thread(parent: int) -> None:
    """Between fork and exec: give this process its own group, and kill it when the parent's main thread ends.

    A Ctrl-C on a terminal then reaches only the launcher's process group, and the launcher forwards it once.
    """
    os.setpgid(0, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
