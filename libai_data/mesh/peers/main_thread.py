"""Finds out whether the main thread waits inside OneFlow, perhaps for a rank that has left."""

from __future__ import annotations

import logging
import os
import platform
import resource
import struct
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Callable

logger = logging.getLogger(__name__)

_IDLE = 0.1  # cores; a process that uses less counts as idle
_YIELDING, _TIMES_THE_OWN = 0.02, 2.0
"""OneFlow waits for other ranks in a busy loop that yields. Then the system's CPU time is above this part of a core,
and above this multiple of the process's own CPU time."""

_WORDS_WITH_STACK = 9  # of /proc/pid/syscall: a number, six arguments, the stack's address, and the next instruction
_BYTES_OF_STACK, _BYTES_OF_ADDRESS = 1 << 15, struct.calcsize("@N")
_LONGEST_CALL = 7
_OPCODE_LENGTHS = 2, 3, 4, 6, 7  # of a call to an address in a register or in memory

_C, _ONEFLOW, _PYTHON = "C library", "OneFlow", "Python"

# Seconds for which all ranks must wait inside OneFlow to count as waiting for a rank that has left. A process that gets
# no core only seems idle: with ten times more threads than cores, the end of a compiled graph took 6 s.
SECONDS_TO_WAIT = 12.0  # if the work of the rank that has left is complete;
_SECONDS_INCOMPLETE = 60.0  # if the work of the rank that has left is not complete, or GPUs may compute.


class MainThread:
    """Finds out whether the main thread waits inside OneFlow.

    Args:
        has_gpus: the main thread may wait for a GPU while its process is idle.

    Attributes:
        is_idle: between the last two checks, the process computed nothing, or waited in OneFlow's busy loop.
        is_in_oneflow: between the last two checks, the main thread waited in OneFlow.
    """

    def __init__(self, has_gpus: bool) -> None:
        self._folder = f"/proc/self/task/{os.getpid()}"
        self._ident = threading.main_thread().ident or 0
        self._has_gpus = has_gpus
        self._switches: list[str] = []
        self._used, self._at = (0.0, 0.0), 0.0
        self.is_idle = self.is_in_oneflow = False

    def check_visible(self) -> None:
        """Log a warning if this system does not show what a thread waits for."""
        files = [f"{self._folder}/{name}" for name in ("status", "wchan", "syscall")]
        if not all(os.access(file, os.R_OK) for file in files):
            logger.warning(
                "%s cannot be read, so it is not noticed if this rank waits in OneFlow for a rank that has left: it "
                "ends after ONEFLOW_TIMEOUT_SECONDS.",
                " or ".join(files),
            )

    def seconds_to_wait(self, has_left: bool) -> float:
        """Seconds for which the main thread must continue to wait to count as hanging; 0 if it does not wait.

        If `has_left`, the program has ended, and the main thread waits in OneFlow's shutdown, or for threads.
        """
        switches = [line for line in self._shown("status").splitlines() if "ctxt_switches" in line]
        used, now = resource.getrusage(resource.RUSAGE_SELF)[:2], time.monotonic()
        still = bool(switches) and switches == self._switches
        own, of_system = used[0] - self._used[0], used[1] - self._used[1]
        idle = own + of_system < _IDLE * (now - self._at)
        yields = of_system > max(_YIELDING * (now - self._at), _TIMES_THE_OWN * own)
        self._switches, self._used, self._at = switches, used, now
        self.is_idle = idle or yields
        # A thread that sleeps, or reads a file or the network, does not wait for a lock.
        self.is_in_oneflow = still and "futex" in self._shown("wchan") and self._was_called_by_oneflow()
        if self.waits_for_threads():
            return SECONDS_TO_WAIT if idle and not self._has_gpus else _SECONDS_INCOMPLETE
        if not self.is_in_oneflow:
            return 0.0
        # OneFlow calls switch_to_shutting_down after all work that this process has begun is complete.
        frame = sys._current_frames().get(self._ident)
        incomplete = has_left and (not idle or frame is None or frame.f_code.co_name != "switch_to_shutting_down")
        return _SECONDS_INCOMPLETE if incomplete or self._has_gpus else SECONDS_TO_WAIT

    def waits_for_threads(self) -> bool:
        """Whether the program has ended, but threads that are no daemons keep its process alive."""
        frame = sys._current_frames().get(self._ident)
        while frame is not None and frame.f_back is not None:
            frame = frame.f_back
        return frame is not None and frame.f_code is threading._shutdown.__code__  # type: ignore[attr-defined]

    def _shown(self, name: str) -> str:
        """What the kernel shows of the main thread in a file; "" if it cannot be read."""
        with suppress(OSError), open(f"{self._folder}/{name}") as file:
            return file.read()
        return ""

    def _was_called_by_oneflow(self) -> bool:
        """Whether OneFlow, and not Python, has called what the main thread waits for.

        The stack holds the address to which each native function returns, the innermost first. The kernel tells where
        the stack begins: proc(5), /proc/pid/syscall.
        """
        words = self._shown("syscall").split()
        if len(words) < _WORDS_WITH_STACK:
            return False
        with suppress(OSError), open("/proc/self/mem", "rb", buffering=0) as memory:
            stack = os.pread(memory.fileno(), _BYTES_OF_STACK, int(words[-2], 16))
            read = partial(os.pread, memory.fileno(), _LONGEST_CALL)
            return first_caller(stack, _native_code(), read) == _ONEFLOW
        return False


def first_caller(stack: bytes, code: Sequence[tuple[int, int, str]], read: Callable[[int], bytes]) -> str:
    """Who has called the function of the C library that waits, by the addresses to which functions return; or "".

    Words before the first address in the C library are those of its innermost function, and may be stale. So may words
    to which no function returns: the low half of an address is a small number that was written there.

    Args:
        stack: from the innermost function on.
        code: first address, end, and owner of native code.
        read: returns the `_LONGEST_CALL` bytes of the code from an address on.
    """
    has_passed_c = False
    for (address,) in struct.iter_unpack("@N", stack[: len(stack) // _BYTES_OF_ADDRESS * _BYTES_OF_ADDRESS]):
        owner = next((owner for first, end, owner in code if first <= address < end), "")
        if owner == _C:
            has_passed_c = True
        elif owner and has_passed_c and ends_with_call(read(address - _LONGEST_CALL)):
            return owner
    return ""


def ends_with_call(code: bytes) -> bool:
    """Whether machine code of x86-64, of `_LONGEST_CALL` bytes, ends with a call; True on other machines.

    Opcodes E8 (with an offset of 4 bytes) and FF /2: Intel's Software Developer's Manual, volume 2, CALL.
    """
    if platform.machine() != "x86_64":
        return True
    by_address = (code[-length:] for length in _OPCODE_LENGTHS)
    return code[-5] == 0xE8 or any(call[0] == 0xFF and call[1] >> 3 & 7 == 2 for call in by_address)


def _native_code() -> list[tuple[int, int, str]]:
    """The memory with the native code of OneFlow, Python and the C library, as `first_caller` needs it."""
    ranges = []
    with open("/proc/self/maps") as file:
        for line in file:
            where, access, *_, path = line.rstrip("\n").split(maxsplit=5)
            folder, name = os.path.split(path)
            owner = ""
            if os.path.basename(folder) in ("oneflow", "oneflow.libs"):
                owner = _ONEFLOW
            elif "python" in name:
                owner = _PYTHON
            elif name.startswith(("libc.", "libc-", "libpthread")):
                owner = _C
            if "x" in access and owner:
                first, end = (int(each, 16) for each in where.split("-"))
                ranges.append((first, end, owner))
    return ranges
