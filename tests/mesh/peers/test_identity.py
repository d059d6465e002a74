"""Ranks of one job agree on its name, those of two do not, and the name gives no secret away."""

from __future__ import annotations

import logging

import pytest

from libai_data.launch.job_environment import SECRET_VARIABLE, job_id
from libai_data.mesh.peers.same_job import check_same_job

BY_HAND = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "12345", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    "other",
    [
        {**BY_HAND, "MASTER_PORT": "12346"},
        {**BY_HAND, "WORLD_SIZE": "8"},
        {**BY_HAND, "SLURM_JOB_ID": "7"},
        {**BY_HAND, SECRET_VARIABLE: "x"},
    ],
)
def test_jobs_that_differ_in_anything_have_other_names(other: dict[str, str]) -> None:
    assert job_id(other) != job_id(BY_HAND)


def test_ranks_of_a_job_agree_whatever_is_their_own_and_give_no_secret_away() -> None:
    for job in (BY_HAND, {**BY_HAND, SECRET_VARIABLE: "x"}):
        # Each of several launchers names its run by itself.
        assert len({job_id({**job, "RANK": rank, "LIBAI_DATA_JOB": f"run {rank}"}) for rank in "0123"}) == 1
    assert "hidden" not in job_id({**BY_HAND, SECRET_VARIABLE: "hidden"})


def test_a_rank_that_runs_another_program_than_rank_0_is_named_unless_a_secret_shows_its_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    own, theirs = (
        {"job": "one", "machine": "here", "hash": 0, "program": ["train.py", file]} for file in ("b.py", "a.py")
    )
    with caplog.at_level(logging.WARNING, logger="libai_data"):
        check_same_job(theirs, theirs, 1, 2, 1)
        assert not caplog.messages
        check_same_job(own, theirs, 1, 2, 1)
        (told,) = caplog.messages
        assert told.startswith("Rank 1 was started as 'train.py b.py', but rank 0 as 'train.py a.py'. If they belong")
        monkeypatch.setenv(SECRET_VARIABLE, "words")
        check_same_job(own, theirs, 1, 2, 1)
    assert caplog.messages == [told]
