"""A training that is killed at any moment, or told to stop, goes on exactly: the same samples, the same losses."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Callable

import pytest

from libai_data.launch.launcher import STOPPED
from tests.deadline import Deadline
from tests.distributed.jobs import Ended, Job, samples_in_order, start_by_launcher
from tests.distributed.processes import children_of
from tests.properties import is_long_run

SCRIPT = Path(__file__).parent / "scripts" / "interrupted_training.py"
RANKS, STEPS, PERIOD = 4, 50 if is_long_run() else 25, 3
WATCHDOG = 90.0
KILLS = 5
SECONDS_TO_START = 5.0
DROPOUT = "0.5"


def noted(folder: Path, rank: int) -> list[str]:
    path = folder / f"taken-{rank}"
    return path.read_text().splitlines() if path.exists() else []


def steps_taken(folder: Path) -> dict[int, list[str]]:
    """Step -> the samples of its global batch; each run that came to a step must have taken the same."""
    per_rank = []
    for rank in range(RANKS):
        taken: dict[int, list[str]] = {}
        for line in noted(folder, rank):
            if line != "run":
                step, _, *samples = line.split()
                assert taken.setdefault(int(step), samples) == samples, f"rank {rank}, step {step}"
        per_rank.append(taken)
    # 2 x 2: ranks 0 and 1 are tensor peers, and so are ranks 2 and 3.
    assert per_rank[0] == per_rank[1]
    assert per_rank[2] == per_rank[3]
    return {step: per_rank[0][step] + per_rank[2][step] for step in per_rank[0]}


def losses(folder: Path) -> dict[int, str]:
    """Step -> its loss, to the last digit; each run that came to a step must have had the same."""
    found: dict[int, str] = {}
    for line in noted(folder, 0):
        if line != "run":
            step, loss = line.split()[:2]
            assert found.setdefault(int(step), loss) == loss, f"step {step}"
    assert sorted(found) == list(range(len(found)))
    return found


def start(job: Job, *trainings: str, rests: float = 0.0) -> subprocess.Popen:
    # What is started again with the same name resumes, if there is something.
    env = {"LIBAI_DATA_JOB": "interrupted", "LIBAI_DATA_RESTS": str(rests)}
    start_by_launcher(job, SCRIPT, RANKS, str(STEPS), str(PERIOD), *trainings, env=env)
    return job.processes[-1]


def await_steps(folder: Path, lines: int, process: subprocess.Popen) -> bool:
    """Wait until rank 0 has noted so many lines; False if the training ended before."""
    path, deadline = folder / "taken-0", Deadline(WATCHDOG)
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        if process.poll() is not None:
            return False
        assert not deadline.has_passed, "the training makes no steps"
        time.sleep(0.001)
    return True


def finish(*trainings: str) -> None:
    with Job() as job:
        start(job, *trainings)
        ended = job.wait(WATCHDOG)
    assert ended.codes == [0], ended.output


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of two trainings that nothing interrupted, made by one launch of ranks."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    finish(f"{folder / 'whole'}={DROPOUT}", f"{folder / 'plain'}=0")
    return folder


@pytest.fixture(scope="module")
def whole(uninterrupted: Path) -> Path:
    """Folder of the training with dropout."""
    return uninterrupted / "whole"


@pytest.fixture(scope="module")
def plain(uninterrupted: Path) -> Path:
    """Folder of the training without dropout."""
    return uninterrupted / "plain"


def kill_at_a_random_moment(folder: Path, chance: random.Random) -> str:
    """Resume the training and kill all of it; returns what it was doing."""
    with Job() as job:
        before = len(noted(folder, 0))
        process = start(job, f"{folder}={DROPOUT}")
        if chance.random() < 0.2:
            time.sleep(chance.uniform(0, SECONDS_TO_START))
        else:
            await_steps(folder, before + 1 + chance.randrange(1, 3 * STEPS // (2 * KILLS)), process)
            time.sleep(chance.uniform(0, 0.05))
        ended_before = process.poll() is not None
        # The launcher takes all its ranks with it; the machine would too.
        process.kill()
        job.wait(WATCHDOG)
        if ended_before:
            return "ended before"
        if list(folder.glob("*.partial")) or list(folder.glob("*.replaced")):
            return "saving"
        return "training" if len(noted(folder, 0)) > before else "starting"


@pytest.mark.slow
def test_an_uninterrupted_training_takes_the_order_as_it_is(whole: Path) -> None:
    assert steps_taken(whole) == samples_in_order(STEPS)


@pytest.mark.slow
def test_dropout_changes_the_losses(whole: Path, plain: Path) -> None:
    assert losses(whole) != losses(plain)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_training_killed_at_30_random_moments_is_bit_for_bit_the_uninterrupted_one(
    tmp_path: Path, whole: Path, seed: int
) -> None:
    chance = random.Random(seed)
    print(f"killed while: {[kill_at_a_random_moment(tmp_path, chance) for _ in range(KILLS)]}")
    finish(f"{tmp_path}={DROPOUT}")
    assert steps_taken(tmp_path) == samples_in_order(STEPS)
    assert losses(tmp_path) == losses(whole)
    left = {path.name for path in tmp_path.iterdir()}
    assert not [name for name in left if name.endswith((".partial", ".replaced"))]


def signal_to_the_launcher(launcher: int) -> None:
    os.kill(launcher, signal.SIGTERM)


def signal_to_rank_2_alone(launcher: int) -> None:
    alone = [pid for pid in children_of(launcher) if b"\0RANK=2\0" in Path(f"/proc/{pid}/environ").read_bytes()]
    assert len(alone) == 1
    os.kill(alone[0], signal.SIGUSR1)


def stop(folder: Path, steps: int, send: Callable[[int], None]) -> Ended:
    with Job() as job:
        process = start(job, f"{folder}=0", rests=0.3)
        assert await_steps(folder, len(noted(folder, 0)) + 1 + steps, process)
        send(process.pid)
        return job.wait(WATCHDOG)


@pytest.mark.slow
def test_a_signal_to_one_rank_or_all_stops_all_before_the_same_step_with_a_checkpoint(
    tmp_path: Path, plain: Path
) -> None:
    for send, name in ((signal_to_the_launcher, "SIGTERM"), (signal_to_rank_2_alone, "another rank's signal")):
        ended = stop(tmp_path, STEPS // 3, send)
        assert ended.codes == [STOPPED], ended.output
        assert not ended.left
        last = {noted(tmp_path, rank)[-1].split()[0] for rank in range(RANKS)}
        assert len(last) == 1
        step = int(last.pop())
        assert step < STEPS - 1
        assert f"Stopped before step {step + 1}, on {name}; the job ends with exit code 85." in ended.output
        assert (tmp_path / "last_checkpoint").read_text() == f"model_{step:07d}"
        assert [json.loads(line)["iteration"] for line in (tmp_path / "metrics.json").open()][-1] == step
    finish(f"{tmp_path}=0")
    assert steps_taken(tmp_path) == samples_in_order(STEPS)
    # Nothing was done twice: each rank noted each step once.
    assert [line for line in noted(tmp_path, 3) if line != "run"] == [line for line in noted(plain, 3) if line != "run"]
    assert losses(tmp_path) == losses(plain)
