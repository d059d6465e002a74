"""Ranks report to their launcher when they begin and end `import oneflow`, in which each rank waits for all others.

During this wait the process runs no Python code and no signal handler. So the launcher must end the rank if it waits
for a rank that has left, or if it must stop.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress

_VARIABLE = "LIBAI_DATA_JOINING_PIPE"
GRACE_SECONDS = 3.0
"""How long a rank may stay in `import oneflow` after another rank has left, or after a signal to stop."""

GRACE_SECONDS_ELSEWHERE = 20.0
"""The same after another machine has left. If that machine's ranks had joined before, the import ends in this time."""

WAITS, JOINED, FAILED = b"w", b"j", b"f"
"""What a rank reports: it begins `import oneflow`, or this has ended, with or without success."""


class JoiningPipe:
    """The launcher's end of the pipe of one rank; the variable in `environment` gives the rank its descriptor."""

    def __init__(self) -> None:
        self._descriptor, self.inherited = os.pipe()
        os.set_blocking(self._descriptor, False)
        # With the inode, because a program that the rank starts may use the descriptor's number for another file.
        self.environment = {_VARIABLE: f"{self.inherited}:{os.fstat(self.inherited).st_ino}"}
        self._last = b""

    def started(self) -> None:
        """Close the rank's end in the launcher, after the rank was started."""
        os.close(self.inherited)

    def close(self) -> None:
        """Close the launcher's end."""
        os.close(self._descriptor)

    def last_state(self) -> bytes:
        """What the rank has reported last; b"" if nothing."""
        with suppress(BlockingIOError):
            self._last = os.read(self._descriptor, 64)[-1:] or self._last
        return self._last


class JoiningRanks:
    """The pipes of this node's ranks, in the order of their start: which ranks wait in `import oneflow`."""

    def __init__(self) -> None:
        self._pipes: list[JoiningPipe] = []
        self._left_at: float | None = None
        self._waits_since: float | None = None

    def add(self) -> JoiningPipe:
        """Return the pipe of one more rank, before the rank is started."""
        self._pipes.append(JoiningPipe())
        return self._pipes[-1]

    def close(self) -> None:
        """Close all pipes."""
        for pipe in self._pipes:
            pipe.close()

    def waiting(self, codes: Sequence[int | None]) -> list[int]:
        """The local ranks that are in `import oneflow`; `codes` are exit codes, None for ranks that still run."""
        return [rank for rank, code in enumerate(codes) if code is None and self._pipes[rank].last_state() == WAITS]

    def missed(self, codes: Sequence[int | None]) -> int | None:
        """A local rank that ended with code 0 without `import oneflow`, while another rank waits for it there."""
        left = [rank for rank, code in enumerate(codes) if code == 0 and self._pipes[rank].last_state() != JOINED]
        if not left or not self.waiting(codes):
            self._left_at = None
        elif self._left_at is None:
            self._left_at = time.monotonic()
        elif time.monotonic() > self._left_at + GRACE_SECONDS:
            return left[0]
        return None

    def misses_machine(self, codes: Sequence[int | None]) -> bool:
        """Whether local ranks were in `import oneflow` for too long; called after a machine of the job has left."""
        if not self.waiting(codes):
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = time.monotonic()
        return self._waits_since is not None and time.monotonic() > self._waits_since + GRACE_SECONDS_ELSEWHERE


def tell_launcher(state: bytes) -> None:
    """Report the state of this rank to its launcher, if there is one."""
    descriptor, _, inode = os.environ.get(_VARIABLE, "").partition(":")
    if descriptor.isdigit() and inode.isdigit():
        with suppress(OSError):  # The descriptor was closed, or the launcher has ended.
            if os.fstat(int(descriptor)).st_ino == int(inode):
                os.write(int(descriptor), state)
