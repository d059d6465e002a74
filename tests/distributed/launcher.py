"""Runs a test script on several real ranks, with a watchdog that shows where they hang."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Callable, TypeVar

from tests.distributed.jobs import Job, launch_command
from tests.distributed.pool import pool_of
from tests.distributed.processes import BOOTSTRAP, LaunchResult, ranks_environment

Found = TypeVar("Found")


def launch_ranks(
    script: Path,
    nproc: int,
    *args: str,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    end_on_error: bool = True,
    cwd: Path | None = None,
    alone: bool = False,
) -> LaunchResult:
    """Run ``script`` on ``nproc`` ranks of this machine; if one fails, that shows in the exit code and the output.

    The ranks are those of a pool that earlier scripts ran on, unless one of the last four arguments asks for ranks of
    its own, which ``libai_data.launch`` then starts.

    Args:
        timeout: Seconds until all ranks print their stacks, are killed, and ``LaunchTimeout`` is raised.
        end_on_error: End the whole job when a rank raises, whether or not the script cares for that. Pass False to
            test what the library itself does about a rank that raises.
        alone: Start ranks for this script: it changes what later scripts would find. A script that compiles graphs
            does: OneFlow 0.9 can corrupt memory when a graph is short (`libai_data.engine.graph`).
    """
    script = Path(script).resolve()
    if not script.is_file():
        raise FileNotFoundError(f"no script {script} to launch on {nproc} ranks")
    if env is None and cwd is None and end_on_error and not alone:
        return pool_of(nproc).run(script, args, timeout)
    command = [*launch_command(nproc), str(BOOTSTRAP), str(script), *args]
    with Job() as job:
        job.start(command, ranks_environment(env, end_on_error), cwd)
        ended = job.wait(timeout)
        return LaunchResult(ended.codes[0], ended.output)


def found_by_ranks(script: Path, nproc: int, folder: Path, *args: str, timeout: float) -> list[Any]:
    """Run a script on ranks of which each writes what it finds to `<folder>/<rank>.json`, and none fails."""
    launch = launch_ranks(script, nproc, str(folder), *args, timeout=timeout)
    assert launch.returncode == 0, launch.output
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(nproc)]


def ranks_of(mesh: str) -> int:
    """How many ranks a mesh such as "2x2x1" has."""
    return prod(map(int, mesh.partition(",")[0].split("x")))


def once_for_each(
    launches: Sequence[tuple[str, ...]], launch: Callable[[tuple[str, ...]], Found]
) -> Callable[[str], Found]:
    """Get what is found on a mesh; each launch is made once, when one of its meshes is first asked for."""
    made = cache(launch)
    return lambda mesh: made(next(meshes for meshes in launches if mesh in meshes))
