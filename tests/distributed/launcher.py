"""Runs a test script on several real ranks, with a watchdog that shows where they hang."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.deadline import Deadline
from tests.distributed.pool import pool_of
from tests.distributed.processes import (
    BOOTSTRAP,
    LaunchResult,
    LaunchTimeout,
    content_of,
    dump_stacks,
    kill_session,
    ranks_environment,
)


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
    command = [sys.executable, "-m", "libai_data.launch", "--nproc_per_node", str(nproc), str(BOOTSTRAP)]
    command += [str(script), *args]
    with tempfile.TemporaryFile() as output:
        # A session of its own, so that all that it starts can be found and killed, and nothing else.
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=ranks_environment(env, end_on_error),
            cwd=cwd,
            start_new_session=True,
        )
        deadline = Deadline(timeout)
        try:
            while process.poll() is None:
                if deadline.has_passed:
                    dump_stacks(process.pid)
                    kill_session(process)
                    raise LaunchTimeout(
                        f"{nproc} ranks of {script.name} did not end within {timeout:g} s; output and stacks:\n"
                        + content_of(output.fileno())
                    )
                time.sleep(0.01)
        finally:
            kill_session(process)
        return LaunchResult(process.returncode, content_of(output.fileno()))


def found_by_ranks(script: Path, nproc: int, folder: Path, *args: str, timeout: float) -> list[Any]:
    """Run a script on ranks of which each writes what it finds to `<folder>/<rank>.json`, and none fails."""
    launch = launch_ranks(script, nproc, str(folder), *args, timeout=timeout)
    assert launch.returncode == 0, launch.output
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(nproc)]
