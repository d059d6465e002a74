"""In a loop that a user wrote, too: a rank that fails or leaves early, in whatever way, ends the job and is named."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Callable

import pytest

from libai_data.launch.job_environment import SECRET_VARIABLE
from tests.distributed.jobs import Job, check_end, launch_command, run_job, start_by_hand, start_by_launcher
from tests.distributed.processes import ranks_environment
from tests.properties import slowly

SCRIPT = Path(__file__).parent / "scripts" / "own_loop.py"
NEVER_JOINS = Path(__file__).parent / "scripts" / "leave_before_joining.py"
WATCHDOG = 120.0


LEAVING = [
    # start, ranks, what happens on which rank, read mode
    ("launcher", 2, "break:1", "iterable"),
    slowly("by hand", 2, "break in a step:0", "every_rank"),
    slowly("launcher", 3, "break in a step:1", "node"),
    slowly("launcher", 2, "break, but a thread goes on:1", "every_rank"),
    slowly("by hand", 2, "exit:1", "rank0"),
    slowly("by hand", 3, "exit, and the others know:1", "iterable"),
    slowly("by hand", 3, "exit before the loop:2", "iterable"),
]


@pytest.mark.parametrize(("start", "nproc", "case", "readers"), LEAVING)
def test_a_rank_that_leaves_early_ends_all_and_is_named(
    start: str, nproc: int, case: str, readers: str, tmp_path: Path
) -> None:
    ended = run_job(start, SCRIPT, nproc, case, readers, tmp_path)
    check_end(ended, tmp_path)
    rank = case.partition(":")[2]
    others = set(map(str, range(nproc))) - {rank}
    told = set(re.findall(rf"^rank (\d) ends: rank {rank} has left the job after \d+ collectives", ended.output, re.M))
    assert told & others, ended.output
    if "a thread goes on" in case:
        assert f"rank {rank} has ended its program, but its threads go on: my own\n" in ended.output
    if case.startswith("exit, and the others know"):
        assert told == set(map(str, range(nproc))), ended.output


@pytest.mark.parametrize("when", ["at once", slowly("later")])
def test_a_rank_that_leaves_early_is_no_success_if_the_others_need_nothing_any_more(when: str, tmp_path: Path) -> None:
    with Job() as job:
        start_by_launcher(job, SCRIPT.with_name("leave_unnoticed.py"), 2, str(tmp_path), when)
        ended = job.wait(WATCHDOG)
    assert ended.codes == [1], ended.output
    assert not ended.left, ended.output
    assert re.search(
        r"rank 0 has left the job after \d collectives, such as to_global, but rank 1 begins collective number \d",
        ended.output,
    )


MIXING = [
    ("launcher", 2, "skip a batch:1", "iterable"),
    slowly("launcher", 3, "skip a batch:2", "every_rank"),
    slowly("launcher", 3, "skip a batch:0", "rank0"),
    slowly("by hand", 2, "take one more:0", "node"),
    slowly("by hand", 2, "take one more:1", "every_rank"),
]


@pytest.mark.parametrize(("start", "nproc", "case", "readers"), MIXING)
def test_a_rank_that_uses_another_batch_than_the_others_ends_all_before_it_is_used(
    start: str, nproc: int, case: str, readers: str, tmp_path: Path
) -> None:
    ended = run_job(start, SCRIPT, nproc, case, readers, tmp_path)
    check_end(ended, tmp_path)
    named = re.findall(r"ContractError: the ranks use different batches in one step: (.*)\. Every rank", ended.output)
    rank = case.partition(":")[2]
    assert named, ended.output
    for words in named:
        assert re.search(rf"step 6 of the loader \(epoch 0, position {12 * nproc}, .*\) on rank {rank}\b", words), words
        assert re.search(rf"step 5 of the loader \(epoch 0, position {10 * nproc}, .*\) on rank", words), words
    assert "is at its end" not in ended.output


@pytest.mark.parametrize(("readers", "step"), [("every_rank", 2), slowly("node", 0), slowly("rank0", 2)])
def test_ranks_that_use_two_loaders_in_another_order_end_before_they_mix_their_rows(readers: str, step: int) -> None:
    ended = run_job("launcher", SCRIPT.with_name("swap_loaders.py"), 2, readers, step)
    assert ended.codes == [1], ended.output
    assert not ended.left, ended.output
    assert "mixed rows" not in ended.output
    loaders = rf"step {step} of the loader that was made or first used in collective number (\d+)"
    named = re.search(rf"ContractError: the ranks use .*: {loaders}.* on rank 0, but {loaders}", ended.output)
    assert named, ended.output
    assert named[1] != named[2]


CHANGES = [("cut", "every_rank"), slowly("dtype", "node"), slowly("drop", "rank0")]


@pytest.mark.parametrize(("change", "readers"), CHANGES)
def test_ranks_that_change_a_batch_in_different_ways_end_before_it_is_used(change: str, readers: str) -> None:
    ended = run_job("launcher", SCRIPT.with_name("change_batches.py"), 2, change, readers)
    assert ended.codes == [1], ended.output
    assert not ended.left, ended.output
    assert "used changed fields" not in ended.output
    assert re.search(
        r"ContractError: the fields of step 2 of the loader \(epoch 0, position 16, 8 rows\) differ on rank 0-1: "
        r".*\(fields of this rank: tokens \w+ \[4, [456]\]",
        ended.output,
    ), ended.output


def test_ranks_with_other_meshes_end_in_init_with_both_meshes_named() -> None:
    ended = run_job("launcher", SCRIPT.with_name("init_other_meshes.py"), 2)
    assert ended.codes == [1], ended.output
    assert not ended.left, ended.output
    meshes = [rf"init\(data={2 - rank}, tensor={1 + rank}, pipeline=1, layers=1, .* on rank {rank}" for rank in (0, 1)]
    assert re.search(rf"the ranks have begun different collectives: {meshes[0]}, but {meshes[1]}", ended.output)


FAILING = [
    ("by hand", 2, "sample:1", "iterable", "OSError: sample 0 cannot be read"),
    slowly("by hand", 2, "raise:1", "node", "a hook of the user's own: the model is broken"),
]


@pytest.mark.parametrize(("start", "nproc", "case", "readers", "message"), FAILING)
def test_a_rank_that_fails_ends_all(
    start: str, nproc: int, case: str, readers: str, message: str, tmp_path: Path
) -> None:
    ended = run_job(start, SCRIPT, nproc, case, readers, tmp_path)
    check_end(ended, tmp_path)
    assert message in ended.output, ended.output


def test_a_rank_that_exits_with_a_code_after_the_last_collective_ends_the_job_with_it(tmp_path: Path) -> None:
    ended = run_job("launcher", SCRIPT, 2, "exit 3 at the end:1", "iterable", tmp_path)
    check_end(ended, tmp_path)
    assert ended.codes == [3], ended.output
    assert "rank 1 ends: it called sys.exit(3)" in ended.output


@pytest.mark.slow
def test_a_sys_exit_that_was_caught_ends_nothing(tmp_path: Path) -> None:
    ended = run_job("launcher", SCRIPT, 2, "caught:0", "iterable", tmp_path)
    assert ended.codes == [0], ended.output


@pytest.mark.slow
def test_a_rank_that_needs_nobody_any_more_may_end_later_than_the_others(tmp_path: Path) -> None:
    ended = run_job("launcher", SCRIPT, 3, "late:1", "stream+node", tmp_path)
    assert ended.codes == [0], ended.output
    assert "the slowest rank is done" in ended.output
    assert len(re.findall(r"^rank \d is at its end$", ended.output, re.M)) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_of", "refusal"),
    [
        (
            lambda rank: {SECRET_VARIABLE: f"of job {rank}"},
            r"rank 1 of job \w+ met rank 0 of job \w+ at 127\.0\.0\.1, port \d+; two jobs use one port",
        ),
        (
            lambda rank: {"LOCAL_RANK": "0", "NODE_SIZE": "2"},
            "rank 1 was started as local rank 0, but OneFlow found 1 node.*: OneFlow computes wrong sums",
        ),
    ],
    ids=["two jobs", "two nodes on one machine"],
)
def test_ranks_that_should_not_have_met_end_at_their_first_collective(
    env_of: Callable[[int], Mapping[str, str]], refusal: str, tmp_path: Path
) -> None:
    with Job() as job:
        start_by_hand(job, SCRIPT, 2, "none:0", "iterable", str(tmp_path), env_of=env_of)
        ended = job.wait(WATCHDOG)
    assert all(ended.codes), ended.output
    assert re.search(rf"MeshError: {refusal}", ended.output), ended.output
    assert "is at its end" not in ended.output


@pytest.mark.slow
@pytest.mark.parametrize("case", ["return:1", slowly("return:0"), slowly("_exit:2")])
def test_a_rank_that_ends_well_before_it_imports_oneflow_ends_all_and_is_named(case: str, tmp_path: Path) -> None:
    rank = int(case.partition(":")[2])
    waiting = " ".join(str(each) for each in range(3) if each != rank).replace("0 1", "0-1").replace("1 2", "1-2")
    with Job() as job:
        job.start([*launch_command(3), str(NEVER_JOINS), case, str(tmp_path)], ranks_environment(None))
        ended = job.wait(WATCHDOG)
    assert ended.codes == [1], ended.output
    assert not ended.left, ended.output
    assert f"local rank {rank} ended with exit code 0 and never imported oneflow; in 'import oneflow'" in ended.output
    assert f"local rank {waiting} waits for it" in ended.output


@pytest.mark.slow
def test_a_signal_to_stop_ends_ranks_that_wait_in_the_import_of_oneflow(tmp_path: Path) -> None:
    with Job() as job:
        command = [*launch_command(2, "--stop_grace_seconds", "1000"), str(NEVER_JOINS), "work on:1", str(tmp_path)]
        launcher = job.start(command, ranks_environment(None))
        job.wait_for((tmp_path / "ready").exists, "rank that works on")
        launcher.send_signal(signal.SIGTERM)
        ended = job.wait(WATCHDOG)
    assert all(ended.codes), ended.output
    assert not ended.left, ended.output
