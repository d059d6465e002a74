"""How ranks of tests are started, watched and ended."""

from __future__ import annotations

import contextlib
import os
import signal
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
    """How a launch ended."""

    returncode: int  # the launcher's exit code, 0 when every rank succeeded
    output: str  # what the launcher and all ranks wrote to stdout and stderr, in the order it arrived


class LaunchTimeout(AssertionError):
    """The ranks did not finish in time. The message holds their output and the stacks of all their threads."""


def ranks_environment(extra: Mapping[str, str] | None = None, end_on_error: bool = False) -> dict[str, str]:
    """The environment in which ranks run here; by default, what they raise is theirs to end by."""
    env = {name: value for name, value in os.environ.items() if name not in JOB_VARIABLES}
    path = [str(REPOSITORY), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    env["LIBAI_DATA_TEST_END_ON_ERROR"] = str(int(end_on_error))
    env.update(extra or {})
    return env


def dump_stacks(launcher_pid: int) -> None:
    """Make every rank print the stacks of its threads (bootstrap.py registered the signal)."""
    for pid in children_of(launcher_pid):
        _send(pid, signal.SIGUSR2)
        # One after the other: they share the output.
        time.sleep(STACK_DUMP_SECONDS)


def session_members(session: int) -> list[int]:
    """Processes of a session that still run (zombies left out)."""
    members = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            fields = _stat(int(entry))
            if fields and fields[0] not in (b"Z", b"X") and int(fields[3]) == session:
                members.append(int(entry))
    return members


def content_of(descriptor: int) -> str:
    """What an open file holds; its position, which ranks share, stays."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")


def parent_of(pid: int) -> int | None:
    """The process that started another; None if that has ended."""
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def children_of(pid: int) -> set[int]:
    """The processes that a process started, also those that have ended and that nobody has waited for."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit() and parent_of(int(name)) == pid}


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


def command_of(pid: int) -> bytes:
    """The words of a process's command line, with a null byte behind each; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _stat(pid: int) -> list[bytes]:
    """Fields of /proc/PID/stat behind the command's name, which may hold anything: state, parent, group, session."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:  # It ended meanwhile.
        return []


def _send(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)
