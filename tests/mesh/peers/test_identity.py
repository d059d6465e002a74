"""Ranks of one job agree on its name, those of two do not, and the name gives no secret away."""

from __future__ import annotations

import pytest

from libai_data.launch.job_environment import SECRET_VARIABLE, job_id

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
