"""Nobody waits for the dead: a rank that fails ends at once, so that the launcher ends the others."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from libai_data.errors import CheckpointError, ConfigError, MeshError, PeerError, SchemaError
from libai_data.launch.launcher import STOPPED
from libai_data.mesh.peers.liveness import end_process

_SAME_ON_ALL_RANKS = (CheckpointError, ConfigError, MeshError, SchemaError)
_RANK0_SPEAKS_FIRST_SECONDS = 2.0


@contextmanager
def end_job_on_failure(rank: int, world_size: int) -> Iterator[None]:
    """Print the traceback of what is raised within, once, and end the process with code 1.

    An ordinary exit would not do: OneFlow's shutdown waits for the other ranks, which wait for this one in a
    collective, for ONEFLOW_TIMEOUT_SECONDS (hours). A job of one rank has nobody to wait for, and there the exception
    just goes on.
    """
    try:
        yield
    except KeyboardInterrupt:
        if world_size == 1:
            raise
        end_process(130, f"rank {rank} was interrupted")
    except SystemExit as exit_request:
        # A training that was asked to stop ends on all ranks, so that OneFlow's shutdown need not wait long.
        if world_size == 1 or exit_request.code in (0, None, STOPPED):
            raise
        end_process(exit_request.code if isinstance(exit_request.code, int) else 1, str(exit_request))
    except PeerError as error:
        if world_size == 1:
            raise
        # The rank that it names prints the traceback.
        end_process(1, f"rank {rank} ends: {error}")
    except Exception as error:
        if world_size == 1:
            raise
        if rank != 0 and isinstance(error, _SAME_ON_ALL_RANKS):
            # Rank 0 says it too: let it be said once, by the one that is listened to.
            time.sleep(_RANK0_SPEAKS_FIRST_SECONDS)
        end_process(1, f"rank {rank} of {world_size} failed\n{_described(error)}")


def _described(error: Exception) -> str:
    """The traceback; of a mistake in the config, which has its place there and not in the code, the message alone."""
    if isinstance(error, (ConfigError, MeshError)) and error.__cause__ is None:
        return f"{type(error).__name__}: {error}\n"
    return traceback.format_exc()
