"""Nobody waits for the dead: a rank that fails ends at once, so that the launcher ends the others."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable

from libai_data.config import instantiate
from libai_data.errors import CheckpointError, ConfigError, FormatError, MeshError, PeerError, SchemaError, StorageError
from libai_data.launch.launcher import STOPPED
from libai_data.mesh.peers.liveness import end_process

_SAME_ON_ALL_RANKS = (CheckpointError, ConfigError, MeshError, SchemaError)
_SAID_BY_THE_MESSAGE = (*_SAME_ON_ALL_RANKS, FormatError, StorageError)
_RANK0_SPEAKS_FIRST_SECONDS = 2.0


@contextmanager
def end_job_on_failure(rank: int, world_size: int) -> Iterator[None]:
    """Print the traceback of what is raised within, once, and end the process with code 1.

    Of a mistake in the config or the data, which has its place there and not in the code, print the message, after the
    traceback of the user's own code if that raised it.

    An ordinary exit would not do: OneFlow's shutdown waits for the other ranks, which wait for this one in a
    collective, for ONEFLOW_TIMEOUT_SECONDS (hours). A job of one rank has nobody to wait for, and there the exception
    just goes on; if nobody catches it, it is printed likewise.
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
            if isinstance(error, _SAID_BY_THE_MESSAGE):
                sys.excepthook = partial(_print_message, error, sys.excepthook)
            raise
        if rank != 0 and isinstance(error, _SAME_ON_ALL_RANKS):
            # Rank 0 says it too: let it be said once, by the one that is listened to.
            time.sleep(_RANK0_SPEAKS_FIRST_SECONDS)
        end_process(1, f"rank {rank} of {world_size} failed\n{_described(error)}")


def _print_message(expected: Exception, print_exception: Callable[..., Any], *exception: Any) -> None:
    """The hook for exceptions that nobody catches: print an expected one in short."""
    if exception[1] is expected:
        print(_described(expected), end="", file=sys.stderr)
    else:
        print_exception(*exception)


def _described(error: Exception) -> str:
    if not isinstance(error, _SAID_BY_THE_MESSAGE):
        return traceback.format_exc()
    return f"{_of_the_users_code(error)}{type(error).__name__}: {error}\n"


def _of_the_users_code(error: BaseException | None) -> str:
    """The traceback of what caused an error of ours, from the call on that the config describes.

    It is "" if the message says it all: the call itself failed, or there is no cause that is not ours.
    """
    while isinstance(error, _SAID_BY_THE_MESSAGE):
        error = error.__cause__
    if error is None:
        return ""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") == instantiate.__module__:
        frames = frames.tb_next
    if frames is None:
        return ""
    return "".join(traceback.format_exception(type(error), error, frames)) + "\n"
