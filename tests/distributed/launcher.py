"""Starts a test script on several real ranks, with a watchdog that shows where they hang."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BOOTSTRAP = Path(__file__).resolve().with_name("bootstrap.py")

# What one rank must not inherit from a job that happens to run the tests.
JOB_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_SIZE")
STACK_DUMP_SECONDS = 0.5


@dataclass(frozen=True)
class LaunchResult:
    """How a launch ended.

    Attributes:
        returncode: The launcher's exit code, 0 when every rank succeeded.
        output: What the launcher and all ranks wrote to stdout and stderr, in the order it arrived.
    """

    returncode: int
    output: str


class LaunchTimeout(AssertionError):
    """The ranks did not finish in time. The message holds their output and the stacks of all their threads."""


def launch_ranks(
    script: Path,
    nproc: int,
    *args: str,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    end_on_error: bool = True,
    cwd: Path | None = None,
) -> LaunchResult:
    """Run ``script`` on ``nproc`` ranks of this machine through ``libai_data.launch``.

    Args:
        script: The Python script that each rank runs.
        nproc: Number of ranks.
        *args: Arguments of the script.
        timeout: Seconds until all ranks print their stacks, are killed, and ``LaunchTimeout`` is raised.
        env: Environment variables to add to this process's own.
        end_on_error: End the whole job when a rank raises, whether or not the script cares for that. Pass False to
            test what the library itself does about a rank that raises.
        cwd: Working directory of the ranks; by default this process's.

    Returns:
        The exit code and the output. A failing rank does not raise here: check ``returncode``, and show ``output``.

    Raises:
        LaunchTimeout: When the ranks did not end within ``timeout`` seconds.
        FileNotFoundError: When there is no such script.
    """
    script = Path(script).resolve()
    if not script.is_file():
        raise FileNotFoundError(f"no script {script} to launch on {nproc} ranks")
    command = [sys.executable, "-m", "libai_data.launch", "--nproc_per_node", str(nproc), str(BOOTSTRAP)]
    command += [str(script), *args]
    with tempfile.TemporaryFile() as output:
        # A session of its own, so that all that it starts can be found and killed, and nothing else.
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=_environment(env or {}, end_on_error),
            cwd=cwd,
            start_new_session=True,
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            _dump_stacks(process.pid)
            _kill_session(process)
            raise LaunchTimeout(
                f"{nproc} ranks of {script.name} did not end within {timeout:g} s; output and stacks:\n"
                + _read(output.fileno())
            ) from None
        finally:
            _kill_session(process)
        return LaunchResult(process.returncode, _read(output.fileno()))


def _environment(extra: Mapping[str, str], end_on_error: bool) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in JOB_VARIABLES}
    path = [str(REPOSITORY), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    env["LIBAI_DATA_TEST_END_ON_ERROR"] = str(int(end_on_error))
    env.update(extra)
    return env


def _dump_stacks(launcher_pid: int) -> None:
    """Make every rank print the stacks of its threads (bootstrap.py registered the signal)."""
    for pid in _session_members(launcher_pid):
        if _parent(pid) == launcher_pid:
            _send(pid, signal.SIGUSR2)
            # One after the other: they share the output.
            time.sleep(STACK_DUMP_SECONDS)


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the launcher and whatever it left behind. Returns when nothing of it runs any more."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        members = _session_members(process.pid)
        for pid in members:
            _send(pid, signal.SIGKILL)
        if process.poll() is not None and not members:
            return
        time.sleep(0.02)


def _session_members(session: int) -> list[int]:
    """Processes of a session that still run (zombies left out)."""
    members = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            fields = _stat(int(entry))
            if fields and fields[0] not in ("Z", "X") and int(fields[3]) == session:
                members.append(int(entry))
    return members


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat behind the command's name: state, parent, group, session, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # It ended meanwhile.
        return []


def _send(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def _read(descriptor: int) -> str:
    # pread leaves the file position alone, which the ranks share.
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, size, 0).decode(errors="replace")
