"""Starts ranks in several ways and watches how they end, and what they leave behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Callable

import numpy as np

from libai_data.data.samplers import Order
from libai_data.launch.launcher import free_port
from tests.deadline import Deadline, stretched
from tests.distributed.processes import (
    BOOTSTRAP,
    LaunchTimeout,
    content_of,
    dump_stacks,
    ranks_environment,
    session_members,
)

SECONDS_TO_LISTEN = 60.0
SECONDS_TO_NOTICE = 10.0
SECONDS_TO_END = 30.0


@dataclass
class Ended:
    """How a job ended."""

    codes: list[int]  # exit code of each process that was started: of the ranks, or of the launchers
    outputs: list[str]  # what each wrote
    at: float  # when the last process of the job was gone, as `time.time()`
    left: list[int]  # processes that were still there when all that were started had ended

    @property
    def output(self) -> str:
        """What all wrote."""
        return "\n".join(self.outputs)


@dataclass
class Job:
    """Processes that were started together; kills what is left of them at the end."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    files: list[IO[bytes]] = field(default_factory=list)

    def start(self, command: Sequence[str], env: Mapping[str, str], cwd: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own, so that all that it starts can be found and killed."""
        file = tempfile.TemporaryFile()  # noqa: SIM115
        self.files.append(file)
        self.processes.append(
            subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
            )
        )
        return self.processes[-1]

    def wait(self, timeout: float, but: Sequence[int] = ()) -> Ended:
        """Wait until all have ended; after `timeout` seconds the job counts as hung.

        Args:
            but: places of processes that need not end.
        """
        deadline = Deadline(timeout)
        awaited = [process for place, process in enumerate(self.processes) if place not in but]
        while any(process.poll() is None for process in awaited):
            if deadline.has_passed:
                hung = [place for place, process in enumerate(awaited) if process.poll() is None]
                for place in hung:
                    dump_stacks(awaited[place].pid)
                raise LaunchTimeout(
                    f"processes {hung} did not end within {timeout:g} s; output and stacks:\n"
                    + "\n".join(self.outputs())
                )
            time.sleep(0.01)
        # What the ranks started notices that they are gone, but not in the same instant.
        patience = Deadline(SECONDS_TO_NOTICE)
        while self._members(awaited) and not patience.has_passed:
            time.sleep(0.01)
        return Ended([process.poll() or 0 for process in awaited], self.outputs(), time.time(), self._members(awaited))

    def wait_for(self, condition: Callable[[], object], what: str, seconds: float = 90.0) -> None:
        """Wait for something that the processes do; an AssertionError names it if it has not come, or one has ended."""
        deadline = Deadline(seconds)
        while True:
            has_ended = any(process.poll() is not None for process in self.processes)
            if condition():
                return
            assert not has_ended and not deadline.has_passed, f"no {what}; output:\n" + "\n".join(self.outputs())
            time.sleep(0.005)

    @staticmethod
    def _members(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
        return [pid for process in processes for pid in session_members(process.pid)]

    def outputs(self) -> list[str]:
        """What each has written so far."""
        return [content_of(file.fileno()) for file in self.files]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill what is left."""
        for process in self.processes:
            deadline = Deadline(10)
            while (members := session_members(process.pid)) and not deadline.has_passed:
                for pid in members:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.02)
            process.wait()
        for file in self.files:
            file.close()


def launch_command(nproc: int, *flags: str) -> list[str]:
    """The launcher's command line, up to the script."""
    return [sys.executable, "-m", "libai_data.launch", "--nproc_per_node", str(nproc), *flags]


def start_by_launcher(job: Job, script: Path, nproc: int, *args: str, env: Mapping[str, str] | None = None) -> None:
    """Start ranks through `libai_data.launch`: one process of the job."""
    job.start([*launch_command(nproc), str(BOOTSTRAP), str(script), *args], ranks_environment(env))


def start_by_hand(
    job: Job,
    script: Path,
    nproc: int,
    *args: str,
    env: Mapping[str, str] | None = None,
    env_of: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> None:
    """Start each rank as a user would who has no launcher: one process of the job each."""
    port = free_port()
    for rank in range(nproc):
        variables: dict[str, str] = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(nproc),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            **(env or {}),
            **env_of(rank),
        }
        job.start([sys.executable, "-u", str(BOOTSTRAP), str(script), *args], ranks_environment(variables))
        if rank == 0:
            _wait_until_listening(port, job.processes[0])


def run_job(start: str, script: Path, nproc: int, *args: object) -> Ended:
    """Run a script to its end, on ranks that are started by the "launcher" or "by hand"."""
    with Job() as job:
        {"launcher": start_by_launcher, "by hand": start_by_hand}[start](job, script, nproc, *map(str, args))
        return job.wait(120.0)


def _wait_until_listening(port: int, process: subprocess.Popen[bytes]) -> None:
    """A rank of OneFlow 0.9 that comes before rank 0 listens sleeps for 10 seconds."""
    deadline = Deadline(SECONDS_TO_LISTEN)
    while not deadline.has_passed and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.02)


def says_who_is_gone(output: str) -> bool:
    """Whether a rank says why it ends; OneFlow aborts when its own connection breaks, and may do so first."""
    told = re.search(r"^rank \d ends: rank \d\b.*(is gone|failed)", output, re.MULTILINE)
    return bool(told) or "Check failure stack trace" in output


def check_end(ended: Ended, folder: Path) -> None:
    """All ended in time after what `fault` in the folder notes, none with success, and nothing of the job is left."""
    seconds = ended.at - float((folder / "fault").read_text())
    print(f"the job ended {seconds:.2f} s after the fault")
    assert all(ended.codes), ended.output
    assert not ended.left, ended.output
    assert seconds < stretched(SECONDS_TO_END), ended.output


def samples_in_order(steps: int) -> dict[int, list[str]]:
    """What each step of a `NotingTrainer` is to take of 40 samples, 8 at a time, from the order alone."""
    _, indices = Order(40, 1234).locate(np.arange(steps * 8))
    return {step: list(map(str, rows)) for step, rows in enumerate(indices.reshape(steps, 8).tolist())}


def runs_of(folder: Path, rank: int) -> list[dict[int, list[str]]]:
    """What a rank of a `NotingTrainer` took: for each run of the training, step -> samples."""
    runs: list[dict[int, list[str]]] = []
    notes = folder / f"taken-{rank}"
    for line in notes.read_text().splitlines() if notes.exists() else ():
        if line == "run":
            runs.append({})
        else:
            step, _, *samples = line.split()
            runs[-1][int(step)] = samples
    return runs
