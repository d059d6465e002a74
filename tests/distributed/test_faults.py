"""A failure anywhere ends all ranks within seconds, says what happened and where, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from libai_data.mesh.peers.links import SECONDS_TO_MEET_VARIABLE
from tests.distributed.jobs import Job, check_end, run_job, says_who_is_gone, start_by_hand, start_by_launcher
from tests.properties import slowly

SCRIPT = Path(__file__).parent / "scripts" / "faults_job.py"
WATCHDOG = 90.0


def tracebacks(output: str, of: str) -> int:
    """How many tracebacks end with a line that begins so."""
    return len(re.findall(rf"^(?:[\w.]+\.)?{of}", output, re.MULTILINE))


RAISING = [
    # start, ranks, case, readers, workers, the error, the rank that it comes from
    slowly("launcher", 2, "dataset", "every_rank", 0, "OSError: sample 45 cannot be read", 1),
    slowly("by hand", 3, "dataset", "node", 0, "OSError: sample 45 cannot be read", 0),
    slowly("launcher", 3, "dataset", "rank0", 2, "OSError: sample 45 cannot be read", 0),
    slowly("by hand", 2, "dataset", "every_rank", 2, "OSError: sample 45 cannot be read", 1),
    ("launcher", 2, "dataset", "node", 0, "OSError: sample 45 cannot be read", 0),
    slowly("launcher", 2, "raise:1", "node", 0, "RuntimeError: the model of rank 1 is broken", 1),
    slowly("by hand", 3, "raise:2", "rank0", 2, "RuntimeError: the model of rank 2 is broken", 2),
]


@pytest.mark.parametrize(("start", "nproc", "case", "readers", "workers", "error", "rank"), RAISING)
def test_an_exception_on_one_rank_ends_all_and_is_told_once(
    start: str, nproc: int, case: str, readers: str, workers: int, error: str, rank: int, tmp_path: Path
) -> None:
    ended = run_job(start, SCRIPT, nproc, case, readers, workers, tmp_path)
    check_end(ended, tmp_path)
    assert ended.output.count(f"rank {rank} of {nproc} failed\nTraceback") == 1, ended.output
    assert tracebacks(ended.output, error) == 1, ended.output
    if start == "launcher":
        assert f"local rank {rank} ended with exit code 1; stopping the others" in ended.output
    if start == "by hand":
        for place, output in enumerate(ended.outputs):
            if place != rank:
                assert says_who_is_gone(output), ended.output


DYING = [
    slowly("launcher", 3, "kill:1", "every_rank", 0),
    ("launcher", 2, "kill:0", "rank0", 2),
    # Forked workers hold what was open when they were made.
    slowly("by hand", 3, "kill:0", "node+fork", 2),
    slowly("by hand", 3, "kill:1", "rank0", 2),
    slowly("by hand", 3, "kill:2", "every_rank", 0),
    slowly("by hand", 2, "term:1", "node", 0),
    slowly("by hand", 2, "exit:0", "node", 2),
]


@pytest.mark.parametrize(("start", "nproc", "case", "readers", "workers"), DYING)
def test_a_rank_that_is_killed_ends_all(
    start: str, nproc: int, case: str, readers: str, workers: int, tmp_path: Path
) -> None:
    ended = run_job(start, SCRIPT, nproc, case, readers, workers, tmp_path)
    check_end(ended, tmp_path)
    dead = int(case.partition(":")[2])
    if start == "by hand":
        for place, output in enumerate(ended.outputs):
            if place != dead:
                assert says_who_is_gone(output), ended.output
    else:
        assert f"local rank {dead} ended with signal SIGKILL" in ended.output


@pytest.mark.slow
def test_a_rank_that_is_interrupted_is_named(tmp_path: Path) -> None:
    ended = run_job("launcher", SCRIPT, 2, "interrupt:1", "every_rank", 0, tmp_path)
    check_end(ended, tmp_path)
    assert ended.codes == [130]
    assert "\nrank 1 was interrupted\n" in ended.output
    assert "Traceback" not in ended.output


@pytest.mark.parametrize("readers", [slowly("node"), "rank0"])
def test_a_killed_worker_is_replaced_and_the_job_goes_on(readers: str, tmp_path: Path) -> None:
    ended = run_job("launcher", SCRIPT, 2, "kill_worker:0", readers, 2, tmp_path)
    assert ended.codes == [0], ended.output
    assert (tmp_path / "fault").exists()
    assert not ended.left
    # 10 batches of 8 samples, in the dataset's order; a field holds each sample's index 8 times.
    assert len(re.findall(rf"rank . ends as planned after 10 steps: {8 * sum(range(80))}$", ended.output, re.M)) == 2


@pytest.mark.slow
def test_a_launcher_that_is_told_to_stop_stops_all(tmp_path: Path) -> None:
    with Job() as job:
        start_by_launcher(job, SCRIPT, 2, "hang:1", "node", "2", str(tmp_path))
        job.wait_for((tmp_path / "fault").exists, "fault")
        (tmp_path / "fault").write_text(repr(time.time()))
        os.kill(job.processes[0].pid, signal.SIGTERM)
        check_end(job.wait(WATCHDOG), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("absent", [slowly(0), 1])
def test_ranks_do_not_wait_for_ever_for_one_that_never_comes(absent: int, tmp_path: Path) -> None:
    with Job() as job:
        env = {SECONDS_TO_MEET_VARIABLE: "2"}
        start_by_hand(job, SCRIPT, 3, f"absent:{absent}", "node", "0", str(tmp_path), env=env)
        # The absent one sleeps; no other rank can end it.
        ended = job.wait(WATCHDOG, but=[absent])
        check_end(ended, tmp_path)
    # OneFlow may abort the second rank, before it says this, when the first one is gone.
    outputs = [output for rank, output in enumerate(ended.outputs) if rank != absent]
    spoke = ["ends: not all ranks have started within 2 s" in output for output in outputs]
    assert any(spoke), ended.output
    assert all(said or code == -signal.SIGABRT for said, code in zip(spoke, ended.codes)), ended.output
