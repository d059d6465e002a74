"""A disk that fills up while a checkpoint is written costs that checkpoint and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from libai_data.engine.checkpoint.directory import verify
from tests import full_disk
from tests.distributed.launcher import launch_ranks

SCRIPT = Path(__file__).parent / "scripts" / "train_on_a_full_disk.py"
RANKS = 2
# What is started again with the same name resumes.
JOB = {"LIBAI_DATA_JOB": "on a full disk"}
KILOBYTES, HIDDEN = 500, 1000
"""Room for three checkpoints of about 125 KB."""


@pytest.fixture()
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    with full_disk.small_disk(tmp_path / "disk", KILOBYTES) as folder:
        yield folder


@pytest.mark.slow
def test_a_training_on_a_full_disk_says_so_and_goes_on_and_resumes_when_there_is_room(small_disk: Path) -> None:
    # The fourth checkpoint does not fit; from step 8 on, no byte does.
    full = launch_ranks(SCRIPT, RANKS, str(small_disk), str(HIDDEN), "8", timeout=90, env=JOB, end_on_error=False)
    assert full.returncode == 1, full.output
    for step in (7, 9, 11):
        said = f"model_{step:07d} could not be written: [Errno 28] No space left on device. The training continues"
        assert full.output.count(said) == RANKS, full.output
    assert "iteration 11/11" in full.output
    # The training reached its end, but has not kept it.
    assert "CheckpointError: checkpoint" in full.output
    assert "model_final could not be written" in full.output
    assert (small_disk / "last_checkpoint").read_text() == "model_0000005"
    kept = sorted(path.name for path in small_disk.iterdir() if path.name.startswith("model"))
    assert kept == ["model_0000001", "model_0000003", "model_0000005"]
    for name in kept:
        verify(small_disk / name)

    full_disk.resize(small_disk, 4000)
    resumed = launch_ranks(SCRIPT, RANKS, str(small_disk), str(HIDDEN), timeout=90, env=JOB, end_on_error=False)
    assert resumed.returncode == 0, resumed.output
    assert resumed.output.count("BEGINS AT 6") == RANKS
    assert (small_disk / "last_checkpoint").read_text() == "model_final"
