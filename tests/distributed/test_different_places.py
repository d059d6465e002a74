"""Ranks whose collectives differ, while none leaves, would wait for ever: the job ends, and says where each waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.jobs import Job, start_by_launcher
from tests.properties import slowly

SCRIPT = Path(__file__).parent / "scripts" / "wait_in_different_places.py"
WATCHDOG = 200.0
DIFFERENT, WAITING = "the ranks have begun different collectives: ", "all ranks wait, and none can continue: "
CASES = [
    ("read modes", DIFFERENT, "a comparison of a loader's arguments, its collective number 2"),
    slowly(
        "one step more", "the ranks do not get the same data at step ", "the step differs: 6 on rank 0, but 5 on rank 1"
    ),
    slowly("one to_global more", DIFFERENT, "synchronize, its collective number"),
    slowly("one batch more", WAITING, "a batch of rank 0, after"),
    slowly("one step less", WAITING, "in OneFlow, after"),
]


@pytest.mark.parametrize(("case", "why", "where"), CASES)
def test_ranks_that_wait_in_different_places_end_and_are_named(case: str, why: str, where: str) -> None:
    with Job() as job:
        start_by_launcher(job, SCRIPT, 2, case)
        ended = job.wait(WATCHDOG)
    assert all(ended.codes), ended.output
    assert not ended.left, ended.output
    assert why in ended.output, ended.output
    assert where in ended.output, ended.output
    assert "wait_in_different_places.py" in ended.output, ended.output
    assert "Check failed" not in ended.output, ended.output
    assert "at its end" not in ended.output


@pytest.mark.slow
def test_ranks_that_wait_for_a_slow_one_are_left_alone() -> None:
    with Job() as job:
        start_by_launcher(job, SCRIPT, 2, "slow")
        ended = job.wait(WATCHDOG)
    assert ended.codes == [0], ended.output
