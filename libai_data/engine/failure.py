"""A rank that fails ends at once, so that the launcher ends the other ranks and none waits."""

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
from libai_data.mesh.peers.watchdog import end_after, end_process

_SAME_ON_ALL_RANKS = (CheckpointError, ConfigError, MeshError, SchemaError)
_MESSAGE_IS_ENOUGH = (*_SAME_ON_ALL_RANKS, FormatError, StorageError)
_SECONDS_AFTER_RANK0 = 2.0


@contextmanager
def end_job_on_failure(rank: int, world_size: int) -> Iterator[None]:
    """If the block raises an exception, print its traceback once, and end the process with code 1.

    For a mistake in the config or the data, print only the message. If the user's own code raised the error, print the
    traceback of that code before the message.

    An ordinary exit would hang: OneFlow's shutdown waits for the other ranks, which wait for this rank in a
    collective, for ONEFLOW_TIMEOUT_SECONDS (hours). In a job of one rank, the exception is raised as usual. If it is
    not caught, it is printed in the same way.
    """
    try:
        yield
    except KeyboardInterrupt:
        if world_size == 1:
            raise
        end_process(130, f"rank {rank} was interrupted")
    except SystemExit as exit_request:
        # A training that was asked to stop ends on all ranks, so OneFlow's shutdown does not wait long.
        if world_size == 1 or exit_request.code in (0, None, STOPPED):
            raise
        end_process(exit_request.code if isinstance(exit_request.code, int) else 1, str(exit_request))
    except PeerError as error:
        if world_size == 1:
            raise
        # The rank that the PeerError names prints the traceback.
        end_after(error, rank)
    except Exception as error:
        if world_size == 1:
            if isinstance(error, _MESSAGE_IS_ENOUGH):
                sys.excepthook = partial(_print_message, error, sys.excepthook)
            raise
        if rank != 0 and isinstance(error, _SAME_ON_ALL_RANKS):
            # Rank 0 has the same error: it prints first, and the launcher then ends this rank before it prints too.
            time.sleep(_SECONDS_AFTER_RANK0)
        end_process(1, f"rank {rank} of {world_size} failed\n{_described(error)}")


def _print_message(expected: Exception, print_exception: Callable[..., Any], *exception: Any) -> None:
    """The hook for uncaught exceptions: of the `expected` exception, print the message without our traceback."""
    if exception[1] is expected:
        print(_described(expected), end="", file=sys.stderr)
    else:
        print_exception(*exception)


def _described(error: Exception) -> str:
    if not isinstance(error, _MESSAGE_IS_ENOUGH):
        return traceback.format_exc()
    return f"{_of_the_users_code(error)}{type(error).__name__}: {error}\n"


def _of_the_users_code(error: BaseException | None) -> str:
    """The traceback of the user's exception that caused an error of this package, from the call in the config on.

    It is "" if the message is sufficient: the call itself failed, or no exception of other code is the cause.
    """
    while isinstance(error, _MESSAGE_IS_ENOUGH):
        error = error.__cause__
    if error is None:
        return ""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") == instantiate.__module__:
        frames = frames.tb_next
    if frames is None:
        return ""
    return "".join(traceback.format_exception(type(error), error, frames)) + "\n"
