"""The moment in which ranks find each other: `import oneflow`, which waits for the last of them for ever.

Meanwhile it lets no other thread of the process run, so that whoever is to end the wait has to be another process.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from libai_data.waiting_times import seconds_from_environment

SECONDS_TO_JOIN_VARIABLE = "LIBAI_DATA_SECONDS_TO_JOIN"
_SECONDS_TO_JOIN = 600.0


def join_ranks(rank: int, world_size: int) -> None:
    """Import OneFlow, which joins this process to the job; end the process if the others do not come in time.

    Args:
        rank: this rank.
        world_size: ranks of the job.

    Raises:
        ConfigError: LIBAI_DATA_SECONDS_TO_JOIN is no positive number.
    """
    seconds = seconds_to_join()
    if world_size == 1:
        importlib.import_module("oneflow")
        return
    with _ending_after(
        seconds,
        f"rank {rank} ends: the {world_size} ranks have not all come within {seconds:g} s; were all of them started, "
        f"with the same MASTER_ADDR and MASTER_PORT? {SECONDS_TO_JOIN_VARIABLE} sets how long to wait\n",
    ):
        importlib.import_module("oneflow")


def seconds_to_join() -> float:
    """How long ranks wait for each other to start: 600 s, or what LIBAI_DATA_SECONDS_TO_JOIN says.

    Raises:
        ConfigError: The variable is no positive number.
    """
    return seconds_from_environment(SECONDS_TO_JOIN_VARIABLE, _SECONDS_TO_JOIN)


@contextmanager
def _ending_after(seconds: float, message: str) -> Iterator[None]:
    """Kill this process from a child of it, after so many seconds in the block."""
    parent = os.getpid()
    heard, told = os.pipe()
    child = os.fork()
    if child == 0:
        # Nothing but system calls: other threads of the parent may have held any lock.
        try:
            os.close(told)
            # The pipe closes with the block, and also with the parent.
            if not select.select([heard], [], [], seconds)[0] and os.getppid() == parent:
                os.write(2, message.encode())
                os.kill(parent, signal.SIGKILL)
        finally:
            os._exit(0)
    os.close(heard)
    try:
        yield
    finally:
        os.close(told)
        os.waitpid(child, 0)
