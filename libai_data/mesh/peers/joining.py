"""The moment in which ranks find each other: `import oneflow`, which waits for the last of them for ever.

Meanwhile it lets no other thread of the process run, so that whoever is to end the wait has to be another process. The
import hook of `launch/cuda_libraries.py` is given this module, so that it works in any script that imports this package
before OneFlow.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from libai_data.launch.job_environment import seconds_from_environment
from libai_data.launch.ports import refuse_port_in_use
from libai_data.mesh.peers.liveness import begin_to_watch

# The module that connects to the other ranks as it is loaded.
_JOINS = "oneflow._oneflow_internal"
SECONDS_TO_JOIN_VARIABLE = "LIBAI_DATA_SECONDS_TO_JOIN"
_SECONDS_TO_JOIN = 600.0


@contextmanager
def joining() -> Iterator[None]:
    """Around the import of OneFlow, which joins this process to the job: end it if the other ranks do not come in time.

    From then on, or at once where OneFlow is imported already, it watches over them (`liveness`).

    Raises:
        ConfigError: Another program listens on the port of rank 0, which this is; or LIBAI_DATA_SECONDS_TO_JOIN is no
            positive number.
    """
    rank, world_size, port = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if not (rank.isdigit() and world_size.isdigit() and port.isdigit() and int(world_size) > 1):
        yield  # One process alone, or something that OneFlow says better.
        return
    if _JOINS in sys.modules:
        yield
        begin_to_watch()
        return
    seconds = seconds_to_join()
    if int(rank) == 0:
        refuse_port_in_use(int(port))
    with _ending_after(
        seconds,
        f"rank {rank} ends: the {world_size} ranks have not all come within {seconds:g} s; were all of them started, "
        f"with the same MASTER_ADDR and MASTER_PORT? {SECONDS_TO_JOIN_VARIABLE} sets how long to wait\n",
    ):
        yield
    begin_to_watch()


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
