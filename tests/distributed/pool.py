"""Ranks that are started once and run many scripts, one after the other.

A start costs each rank the import of OneFlow and the meeting with the other ranks. A script that runs on a pool pays
neither. A script that fails, hangs or kills a rank ends its pool; the next script starts a new one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any, cast

from tests.deadline import Deadline
from tests.distributed.jobs import Job, launch_command
from tests.distributed.processes import (
    BOOTSTRAP,
    LaunchResult,
    LaunchTimeout,
    content_of,
    dump_stacks,
    ranks_environment,
)

SECONDS_TO_START = 60.0
DIED = -1  # in place of the exit code of a rank that did not report one


class RankPool:
    """Ranks of one job that wait for scripts."""

    def __init__(self, nproc: int) -> None:
        self._ranks: list[Connection] = []
        self._scripts: list[str] = []  # that it has run
        self._job = Job()
        folder = tempfile.TemporaryDirectory(prefix="pool-")
        with folder, Listener(os.path.join(folder.name, "socket"), backlog=nproc) as listener:
            command = [*launch_command(nproc), str(BOOTSTRAP), "--pool", str(listener.address)]
            self._launcher = self._job.start(command, ranks_environment())
            self._await_ranks(listener, nproc)

    def _await_ranks(self, listener: Listener, nproc: int) -> None:
        accepting = listener._listener._socket  # type: ignore[attr-defined]  # to wait for a limited time
        deadline = Deadline(SECONDS_TO_START)
        while len(self._ranks) < nproc:
            accepting.settimeout(max(0.1, deadline.seconds_left))
            try:
                self._ranks.append(listener.accept())
            except OSError:
                if not deadline.has_passed:  # It is longer by now.
                    continue
                came, (output,) = len(self._ranks), self._job.outputs()
                self.close()
                raise LaunchTimeout(
                    f"{came} of {nproc} ranks of a pool came in time; their output:\n{output}"
                ) from None

    @property
    def is_usable(self) -> bool:
        """Whether all ranks wait for a script."""
        return self._launcher.poll() is None and bool(self._ranks)

    def run(self, script: Path, args: Sequence[str], timeout: float) -> LaunchResult:
        """Run a script on all ranks; see `launch_ranks`."""
        with tempfile.NamedTemporaryFile(prefix="output-") as output:
            for rank in self._ranks:
                rank.send((str(script), list(args), output.name))
            codes = self._codes(timeout)
            if codes is None:
                dump_stacks(self._launcher.pid)
                self.close()
                raise LaunchTimeout(
                    f"{len(self._ranks)} ranks of {script.name} did not end within {timeout:g} s; output and stacks:\n"
                    + content_of(output.fileno())
                )
            said = content_of(output.fileno())
            if DIED in codes:
                said += f"A rank of the pool died. Before, the pool had run: {', '.join(self._scripts) or 'nothing'}\n"
            self._scripts.append(" ".join([script.name, *args]))
            if any(codes):
                self.close()
            return LaunchResult(next((code for code in codes if code), 0), said)

    def _codes(self, timeout: float) -> list[int] | None:
        """The exit codes that ranks report, or None if they hang; after the first failure nobody is waited for."""
        deadline = Deadline(timeout)
        waiting: list[Any] = list(self._ranks)
        codes: list[int] = []
        while waiting and not any(codes):
            ready = wait(waiting, deadline.seconds_left)
            if not ready and deadline.has_passed:  # It may have become longer meanwhile.
                return None
            for rank in ready:
                waiting.remove(rank)
                try:
                    codes.append(int(cast(Connection, rank).recv()))
                except (EOFError, OSError):
                    codes.append(DIED)
        return codes

    def close(self) -> None:
        """End the ranks."""
        for rank in self._ranks:
            rank.close()
        self._job.end()


_pools: dict[int, RankPool] = {}


def pool_of(nproc: int) -> RankPool:
    """The pool of so many ranks, started when there is none."""
    pool = _pools.get(nproc)
    if pool is None or not pool.is_usable:
        pool = _pools[nproc] = RankPool(nproc)
    return pool


def close_pools() -> None:
    """End all pools of this process."""
    while _pools:
        _pools.popitem()[1].close()
