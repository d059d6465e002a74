"""`--max-restarts`: again after a failure, as long as that helps, and never for what will fail again at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.engine.launch_facts import problem_on
from libai_data.launch.exit_codes import STOPPED
from libai_data.launch.restarts import SECONDS_TO_PROVE_ITSELF, Restarts, Training, run_with_restarts
from tests.deadline import run_to_end
from tests.distributed.processes import REPOSITORY
from tests.engine.tiny import tiny_config

# How a run ends: its exit code, after how many seconds, and whether there was a new checkpoint.
End = tuple[int, float, bool]
ENDS = st.tuples(st.sampled_from([0, 1, 7, STOPPED, 137]), st.sampled_from([1.0, 1000.0]), st.booleans())


class Runs:
    stop_signal: int | None = None

    def __init__(self, ends: list[End]) -> None:
        self.ends: Iterator[End] = iter(ends)
        self.arguments: list[list[str]] = []
        self.codes: list[int] = []
        self.now = 0.0
        self.checkpoints = 0
        self.chosen = 0

    def run(self, script_args: list[str]) -> int:
        self.arguments.append(script_args)
        code, seconds, saved = next(self.ends)
        self.codes.append(code)
        self.now += seconds
        self.checkpoints += saved
        return code

    def choose_again(self) -> str:
        self.chosen += 1
        return ""


def drive(ends: list[End], limit: int) -> tuple[Runs, int]:
    runs = Runs(ends)
    restarts = Restarts(limit, lambda: (str(runs.checkpoints), runs.checkpoints), clock=lambda: runs.now)
    return runs, run_with_restarts(runs, ["train.seed=1"], restarts)


@given(ends=st.lists(ENDS, min_size=8, max_size=8), limit=st.integers(0, 6))
def test_runs_follow_each_other_until_one_succeeds_the_limit_is_used_up_or_the_same_comes_again_at_once(
    ends: list[End], limit: int
) -> None:
    runs, code = drive(ends, limit)
    count = len(runs.codes)
    assert code == ends[count - 1][0]
    assert count <= limit + 1
    for place in range(count - 1):
        assert ends[place][0] not in (0, STOPPED)
    at_once = [seconds < SECONDS_TO_PROVE_ITSELF and not saved for _, seconds, saved in ends]
    same = [at_once[k] and at_once[k - 1] and ends[k][0] == ends[k - 1][0] for k in range(1, count)]
    assert not any(same[:-1])
    if code not in (0, STOPPED) and count <= limit:
        assert same[-1]


def test_the_script_gets_resume_once_before_its_overrides() -> None:
    runs, _ = drive([(1, 1000.0, False), (1, 1000.0, False), (0, 1.0, False)], 5)
    assert runs.arguments == [["train.seed=1"], ["--resume", "train.seed=1"], ["--resume", "train.seed=1"]]
    assert runs.chosen == 2


def test_an_earlier_runs_checkpoints_that_go_out_of_the_way_are_no_progress() -> None:
    found = iter([("model_final", 1), ("", 0), ("", 0), ("", 0), ("", 0)])
    restarts = Restarts(9, lambda: next(found), clock=lambda: 0.0)
    restarts.begin()
    assert restarts.refusal(1) == ""
    restarts.begin()
    assert "occurred twice" in restarts.refusal(1)


# Every run ends at once by this clock, however busy the machine is.
LAUNCHER = """
import sys
from functools import partial
from libai_data.launch import launcher
launcher.Restarts = partial(launcher.Restarts, clock=lambda: 0.0)
sys.exit(launcher.main())
"""


def launch(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_to_end([sys.executable, "-c", LAUNCHER, *map(str, arguments)], 200, cwd=REPOSITORY)


def test_a_rank_that_is_killed_starts_all_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, socket, sys, time\n"
        "again = '--resume' in sys.argv\n"
        "os.write(1, f\"rank {os.environ['RANK']}: {sys.argv[1:]}\\n\".encode())\n"
        "if os.environ['RANK'] == '0':\n"
        "    server = socket.create_server(('127.0.0.1', int(os.environ['MASTER_PORT'])))\n"
        "if not again and os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(0 if again else 1000)\n"
    )
    ended = launch("--nproc_per_node", 2, "--max-restarts", 3, script, "--an", "argument")
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [
        "rank 0: ['--an', 'argument']",
        "rank 0: ['--resume', '--an', 'argument']",
        "rank 1: ['--an', 'argument']",
        "rank 1: ['--resume', '--an', 'argument']",
    ]
    assert "libai_data.launch: restart 1 of 3, from this job's last checkpoint, if there is one" in ended.stderr


@pytest.mark.slow
def test_a_mistake_in_the_config_is_not_tried_for_ever() -> None:
    arguments = ["--config-file", "configs/vit_digits.py", "train.no_such_key=1"]
    ended = launch("--max-restarts", 9, "tools/train_net.py", *arguments)
    assert ended.returncode == 1
    assert "restart 1 of 9" in ended.stderr
    assert "restart 2" not in ended.stderr
    assert (
        "not started again: the same failure (exit code 1) occurred twice, each time within 60 s of the start and "
        "without a new checkpoint; another restart would fail too" in ended.stderr
    )


def test_machines_that_the_scheduler_starts_one_by_one_are_its_to_start_again() -> None:
    ended = launch("--max-restarts", 1, "--nnodes", 2, "-m", "anything")
    assert ended.returncode == 2
    assert "give --hostfile in place of --nnodes, or let the scheduler start all of them again" in ended.stderr


@pytest.mark.parametrize(
    ("dist", "sizes", "problem"),
    [
        ({"tensor_parallel_size": 2}, {"global_batch_size": 8}, ""),
        ({"data_parallel_size": 4}, {"global_batch_size": 8}, "which is 4 ranks, but 2 were started"),
        (
            {},
            {"global_batch_size": None, "train_micro_batch_size": 2},
            "a step would take 4 samples instead of 8; set train.global_batch_size",
        ),
    ],
)
def test_fewer_machines_will_do_where_the_mesh_is_open_and_the_stream_stays(
    dist: dict, sizes: dict, problem: str, tmp_path: Path
) -> None:
    cfg = tiny_config(str(tmp_path), **sizes)
    cfg.train.dist.update(dist)
    assert problem_on(cfg, 2, 2, 2) == ""
    found = problem_on(cfg, 1, 2, 2)
    assert (problem in found) if problem else not found


def test_a_last_checkpoint_that_is_no_text_is_none(tmp_path: Path) -> None:
    (tmp_path / "last_checkpoint").write_bytes(b"\xff\xfe")
    assert Training(tmp_path).last_checkpoint() == ("", 0)
