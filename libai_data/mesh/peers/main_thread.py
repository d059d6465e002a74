"""Finds out whether the main thread waits inside OneFlow, perhaps for a rank that has left."""

from __future__ import annotations

import logging
import os
import resource
import sys
import sysconfig
import threading
import time

logger = logging.getLogger(__name__)

_IDLE = 0.1  # cores; a process that uses less counts as idle
_YIELDING, _TIMES_THE_OWN = 0.02, 2.0
"""OneFlow waits for other ranks in a busy loop that yields. Then the system's CPU time is above this part of a core,
and above this multiple of the process's own CPU time."""

# Seconds for which all ranks must wait inside OneFlow to count as waiting for a rank that has left:
SECONDS_IDLE = 4.0  # if the processes are idle, and the work of the rank that has left is complete;
_SECONDS_BUSY = 12.0  # if a process computes, or waits in a busy loop, as OneFlow does in collectives of two ranks;
_SECONDS_INCOMPLETE = 60.0  # if the work of the rank that has left is not complete, or GPUs may compute.


class MainThread:
    """Finds out whether the main thread waits inside OneFlow.

    Args:
        has_gpus: the main thread may wait for a GPU while its process is idle.

    Attributes:
        is_idle: between the last two checks, the process computed nothing, or waited in OneFlow's busy loop.
        is_in_oneflow: between the last two checks, the main thread waited in OneFlow's own code or its busy loop.
    """

    def __init__(self, has_gpus: bool) -> None:
        self._folder = f"/proc/self/task/{os.getpid()}"
        self._ident = threading.main_thread().ident or 0
        self._standard_library = sysconfig.get_paths()["stdlib"] + os.sep
        self._packages = sysconfig.get_paths()["purelib"] + os.sep
        self._has_gpus = has_gpus
        self._switches, self._used, self._at = "", (0.0, 0.0), 0.0
        self._oneflow = self._packages + "oneflow" + os.sep
        self.is_idle = self.is_in_oneflow = False

    def check_visible(self) -> None:
        """Log a warning if this system does not show what a thread waits for."""
        if not self._context_switches() or not os.path.exists(f"{self._folder}/wchan"):
            logger.warning(
                "%s/wchan or status cannot be read, so it is not noticed if this rank waits in OneFlow for a rank that "
                "has left: it ends after ONEFLOW_TIMEOUT_SECONDS.",
                self._folder,
            )

    def seconds_to_wait(self, has_left: bool) -> float:
        """Seconds for which the main thread must continue to wait to count as hanging; 0 if it does not wait.

        If `has_left`, the program has ended, and the main thread waits in OneFlow's shutdown.
        """
        switches, used, now = self._context_switches(), resource.getrusage(resource.RUSAGE_SELF)[:2], time.monotonic()
        still = bool(switches) and switches == self._switches
        own, of_system = used[0] - self._used[0], used[1] - self._used[1]
        idle = own + of_system < _IDLE * (now - self._at)
        yields = of_system > max(_YIELDING * (now - self._at), _TIMES_THE_OWN * own)
        self._switches, self._used, self._at = switches, used, now
        self.is_idle, self.is_in_oneflow = idle or yields, False
        frame = sys._current_frames().get(self._ident)
        code = frame.f_code if frame is not None else None
        if code is None or not still or not self._sleeps_on_a_lock():
            return 0.0
        if code.co_filename.startswith(self._standard_library) and not code.co_filename.startswith(self._packages):
            return 0.0  # The program waits for something of its own, such as in threading.py or subprocess.py.
        self.is_in_oneflow = yields or code.co_filename.startswith(self._oneflow)
        # OneFlow calls switch_to_shutting_down after all work that this process has begun is complete.
        incomplete = has_left and (code.co_name != "switch_to_shutting_down" or not idle)
        if incomplete or self._has_gpus:
            return _SECONDS_INCOMPLETE
        return SECONDS_IDLE if idle else _SECONDS_BUSY

    def _context_switches(self) -> str:
        try:
            with open(f"{self._folder}/status") as file:
                return "".join(line for line in file if "ctxt_switches" in line)
        except OSError:
            return ""

    def _sleeps_on_a_lock(self) -> bool:
        """Whether the main thread waits as OneFlow does; it does not if it sleeps or reads a file or the network."""
        try:
            with open(f"{self._folder}/wchan") as file:
                return "futex" in file.read()
        except OSError:
            return False
