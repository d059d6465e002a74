"""Restarts a job after a failure, unless the same failure repeats."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Protocol

from libai_data.launch.exit_codes import STOPPED
from libai_data.launch.output import quoted, say

# If the same failure occurs twice within this time after the start, without a new checkpoint, it would occur again.
SECONDS_TO_PROVE_ITSELF = 60.0
_SECONDS_TO_DESCRIBE = 120.0
_RESUME = "--resume"

JOB_VARIABLE = "LIBAI_DATA_JOB"
"""The name of the job, the same for all its restarts. A training resumes from the checkpoints of its own job."""

RESTARTED_VARIABLE = "LIBAI_DATA_RESTARTED"
"""Set if a restart added `--resume`: the run then resumes only from checkpoints of this job, not from older ones."""


class Runner(Protocol):
    """Starts a job, on this machine or on several."""

    stop_signal: int | None  # that the launcher has received, if any

    def run(self, script_args: list[str]) -> int:
        """Start all ranks, and wait until all have ended; returns the exit code of the first that failed, or 0."""

    def choose_again(self) -> str:
        """Prepare another run after a failure; returns the reason why no other run is possible, or ""."""


@dataclass(frozen=True)
class Training:
    """Facts about the script that the ranks run.

    Args:
        checkpoints: the folder of the script's checkpoints; None if unknown.
        problems: number of nodes -> why the config cannot run on this number, or "". Empty if unknown.
    """

    checkpoints: Path | None = None
    problems: dict[int, str] = field(default_factory=dict)

    def last_checkpoint(self) -> tuple[str, int]:
        """Name of the last checkpoint, and time in ns when its name was written; ("", 0) if there is none."""
        if self.checkpoints is None:
            return "", 0
        path = self.checkpoints / "last_checkpoint"
        try:
            return path.read_text(encoding="utf-8").strip(), path.stat().st_mtime_ns
        except (OSError, UnicodeDecodeError):
            return "", 0


@dataclass
class Restarts:
    """Decides after each run whether to restart; `clock` returns seconds."""

    limit: int
    last_checkpoint: Callable[[], tuple[str, int]]
    clock: Callable[[], float] = time.monotonic
    used: int = 0
    _began: float = 0.0
    _checkpoint: tuple[str, int] = ("", 0)
    _early_code: int | None = None

    def begin(self) -> None:
        """Note the time and the last checkpoint at the start of a run."""
        self._began = self.clock()
        self._checkpoint = self.last_checkpoint()

    def has_new_checkpoint(self) -> bool:
        """Whether the run has written a checkpoint."""
        return self.last_checkpoint() not in (("", 0), self._checkpoint)

    def refusal(self, code: int) -> str:
        """The reason not to restart after a failure; "" if the job should restart, which counts as a restart."""
        seconds = self.clock() - self._began
        at_once = seconds < SECONDS_TO_PROVE_ITSELF and not self.has_new_checkpoint()
        again = at_once and self._early_code == code
        self._early_code = code if at_once else None
        if again:
            return (
                f"the same failure (exit code {code}) occurred twice, each time within {SECONDS_TO_PROVE_ITSELF:g} s "
                "of the start and without a new checkpoint; another restart would fail too"
            )
        if self.used >= self.limit:
            return f"all {self.limit} restarts of --max-restarts are used"
        self.used += 1
        return ""


def run_with_restarts(runner: Runner, script_args: Sequence[str], restarts: Restarts) -> int:
    """Run the job, and again after a failure; returns the exit code of the last run.

    From the second run on, the script gets `--resume` before its arguments. The environment then says that the launcher
    added `--resume`, and not the user.
    """
    user_resumes = _RESUME in script_args
    arguments = list(script_args)
    has_own = user_resumes
    while True:
        restarts.begin()
        code = runner.run(arguments)
        if code in (0, STOPPED) or runner.stop_signal or not restarts.limit:
            return code
        refusal = restarts.refusal(code) or runner.choose_again()
        if refusal or runner.stop_signal:
            say(f"not started again: {refusal or 'the launcher was told to stop'}")
            return code
        has_own = has_own or restarts.has_new_checkpoint()
        checkpoint = restarts.last_checkpoint()[0] if has_own else ""
        since = f"from checkpoint {checkpoint}" if checkpoint else "from this job's last checkpoint, if there is one"
        say(f"restart {restarts.used} of {restarts.limit}, {since}")
        if not user_resumes:
            arguments = [_RESUME, *script_args]
            os.environ[RESTARTED_VARIABLE] = "1"


def describe(args: argparse.Namespace, nodes: int) -> Training:
    """Read the config of the script in a separate process, because reading it imports OneFlow."""
    command = [sys.executable, "-m", "libai_data.engine.launch_facts"]
    command += [str(args.nproc_per_node), str(nodes), *args.training_script_args]
    problem = [f"reading it took longer than {_SECONDS_TO_DESCRIBE:g} s"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS_TO_DESCRIBE)
        problem = described.stderr.splitlines()[-5:]
        facts: dict[str, Any] = json.loads(described.stdout.splitlines()[-1])
    except (ValueError, IndexError, subprocess.TimeoutExpired):
        say(
            "cannot read the script's config; its checkpoints and its number of nodes are "
            f"unknown:\n{quoted(problem).rstrip()}"
        )
        return Training()
    return Training(
        Path(facts["checkpoints"]) if facts["checkpoints"] else None,
        {int(nodes): problem for nodes, problem in facts["problems"].items()},
    )
