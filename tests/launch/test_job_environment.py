"""Environment variables of this package: all are known, so that a mistyped one is noticed."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

import libai_data
from libai_data.commands import main
from libai_data.launch.job_environment import (
    VARIABLES,
    mistyped_variables,
    seconds_from_environment,
    warn_of_mistyped_variables,
)


def test_all_variables_that_the_package_reads_are_known() -> None:
    found = set()
    for path in Path(libai_data.__file__).parent.rglob("*.py"):
        found |= set(re.findall(r"\bLIBAI_DATA_([A-Z_]*[A-Z])\b", path.read_text()))
    assert found == set(VARIABLES)


def test_a_mistyped_variable_is_named_with_the_nearest() -> None:
    environment = {f"LIBAI_DATA_{name}": "1" for name in (*VARIABLES, "ROOT", "TEST_END_ON_ERROR")}
    assert mistyped_variables(environment) == []
    assert mistyped_variables({"LIBAI_DATA_CACHE_SZIE": "1GB"}) == [
        "The environment has LIBAI_DATA_CACHE_SZIE, which nothing reads. Did you mean 'LIBAI_DATA_CACHE_SIZE'?"
    ]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_loader_or_a_command_warns_once_on_rank_0_of_a_mistyped_variable(
    rank: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LIBAI_DATA_CACHE_SZIE", "1GB")
    monkeypatch.setenv("RANK", rank)
    loader = libai_data.DataLoader([{"x": 1}], global_batch_size=1, num_workers=0).numpy()
    for use in (lambda: [*loader, *loader], lambda: main(["corpus", "nothing"])):
        warn_of_mistyped_variables.cache_clear()
        caplog.clear()
        use()
        told = [message for message in caplog.messages if "LIBAI_DATA_CACHE_SZIE" in message]
        assert len(told) == (rank == "0")


def test_seconds_may_be_infinite_and_are_a_time_that_a_lock_can_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBAI_DATA_SECONDS_TO_JOIN", "inf")
    assert threading.Lock().acquire(timeout=seconds_from_environment("LIBAI_DATA_SECONDS_TO_JOIN", 600.0))
