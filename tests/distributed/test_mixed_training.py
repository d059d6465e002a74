"""Whole trainings on blends and packs, on 2 x 2 ranks: killed and resumed, the same samples and the same losses."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from libai_data.data.samplers import CyclicSampler, StepSchedule
from tests.data.samplers.step_runs import steps_from
from tests.distributed.jobs import Job, start_by_launcher
from tests.distributed.mixed_data import BATCH_SIZES, STEPS, blended, packed
from tests.distributed.test_interrupted_training import RANKS, SEED, await_steps, losses, noted, steps_taken

# What is started again with the same name resumes.
JOB = {"LIBAI_DATA_JOB": "mixed"}
SCRIPT = Path(__file__).parent / "scripts" / "mixed_training.py"
WATCHDOG = 120.0
# Of trainings with a checkpoint every 4 steps.
KILLED_AFTER = {"packed": 10, "blended": 15}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of trainings that nothing interrupted, and of such that were killed once each."""
    folder = tmp_path_factory.mktemp("mixed")
    for name, steps in KILLED_AFTER.items():
        with Job() as job:
            start_by_launcher(job, SCRIPT, RANKS, str(folder / "killed"), env=JOB)
            assert await_steps(folder / "killed" / name, 1 + steps, job.processes[0])
            job.processes[0].kill()
            job.wait(WATCHDOG)
    with Job() as job:
        start_by_launcher(job, SCRIPT, RANKS, str(folder / "killed"), str(folder / "whole"), env=JOB)
        ended = job.wait(WATCHDOG)
    assert ended.codes == [0], ended.output
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dataset"), [("packed", packed), ("blended", blended)])
def test_a_killed_training_takes_what_one_sampler_takes_and_has_the_same_losses(
    jobs: Path, name: str, dataset: Any
) -> None:
    sampler = CyclicSampler(dataset(), BATCH_SIZES[0][1], shuffle=True, seed=SEED)
    sampler.follow(StepSchedule(BATCH_SIZES))
    expected: list[list[str]] = [
        [f"{epoch}:{index}" for epoch, index in step] for step in islice(steps_from([sampler], 0), STEPS)
    ]
    for kind in ("killed", "whole"):
        taken = steps_taken(jobs / kind / name)
        assert [taken[step] for step in range(STEPS)] == expected, kind
    assert noted(jobs / "killed" / name, 0).count("run") == 2
    assert losses(jobs / "killed" / name) == losses(jobs / "whole" / name)
