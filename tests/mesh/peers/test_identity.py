"""Ranks of one job agree on its name, those of two do not, and the name gives no secret away."""

from __future__ import annotations

import logging
import socket

import pytest

from libai_data.launch.job_environment import SECRET_VARIABLE, job_id
from libai_data.launch.launcher import free_port
from libai_data.mesh.peers import same_job
from libai_data.mesh.peers.same_job import Rank0Answers, check_same_job

BY_HAND = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "12345", "WORLD_SIZE": "4"}

WITH_SECRET = {SECRET_VARIABLE: "x", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("job", "changed"),
    [
        (BY_HAND, {"MASTER_PORT": "12346"}),
        (BY_HAND, {"WORLD_SIZE": "8"}),
        (BY_HAND, {"SLURM_JOB_ID": "7"}),
        (BY_HAND, {SECRET_VARIABLE: "x"}),
        (WITH_SECRET, {"WORLD_SIZE": "6"}),
    ],
)
def test_jobs_that_differ_in_anything_have_other_names(job: dict[str, str], changed: dict[str, str]) -> None:
    assert job_id({**job, **changed}) != job_id(job)


def test_ranks_of_a_job_agree_whatever_is_their_own_and_give_no_secret_away() -> None:
    for job in (BY_HAND, {**BY_HAND, SECRET_VARIABLE: "x"}):
        # Each of several launchers names its run by itself.
        assert len({job_id({**job, "RANK": rank, "LIBAI_DATA_JOB": f"run {rank}"}) for rank in "0123"}) == 1
    assert "hidden" not in job_id({**BY_HAND, SECRET_VARIABLE: "hidden"})


def test_rank_0_reports_once_that_another_machine_has_other_numbers_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    port = free_port()
    answers = Rank0Answers(port, has_joined=False)

    def reported(world_size: str, rank: int, machine: str, more: bytes = b"") -> str:
        monkeypatch.setenv("WORLD_SIZE", world_size)
        monkeypatch.setattr(same_job, "machine", lambda: machine)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.sendto(same_job.question_of(rank) + more, ("127.0.0.1", port))
            found = answers.answer_one()
            assert b"has_joined" in client.recv(1024)
        return found

    asks = "rank 0 waits for its ranks. A rank of 127.0.0.1 that asks to join has"
    try:
        assert reported("4", 1, "first") == reported("4", 2, "second") == reported("4", 2, "second") == ""
        assert reported("4", 1, "second").startswith(f"{asks} RANK 1, as a rank of another machine has. If it belongs")
        assert reported("6", 4, "second").startswith(f"{asks} WORLD_SIZE 6 instead of 4. If it belongs to this job")
        assert reported("6", 5, "second") == reported("4", 1, "second") == ""
        # As from strangers.
        assert reported("\033[2J", 5, "second") == reported("7", 5, "second", b" ?") == ""
        assert sum(bool(reported(str(world_size), 5, "second")) for world_size in range(8, 40)) == 8
    finally:
        answers.close()


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
