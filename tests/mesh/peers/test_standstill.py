"""Ranks that wait for each other in different places wait for ever; all others may continue, however long it takes."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from libai_data.mesh.peers.main_thread import MainThread
from libai_data.mesh.peers.standstill import BATCH, COLLECTIVE, ONEFLOW, OwnPlace, Report, Standstill

import oneflow as flow  # isort: skip


def test_a_system_that_does_not_show_what_a_thread_waits_for_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    thread = MainThread(has_gpus=False)
    with caplog.at_level(logging.WARNING, logger="libai_data"):
        thread.check_visible()
        assert not caplog.messages
        thread._folder = "/nowhere"
        thread.check_visible()
    assert "/nowhere/wchan or /nowhere/syscall cannot be read, so it is not noticed" in caplog.messages[0]


@pytest.mark.parametrize("is_oneflow", [True, False])
def test_a_main_thread_waits_in_oneflow_if_oneflow_called_what_waits(is_oneflow: bool) -> None:
    matrix, lock = flow.ones(1500, 1500), threading.Lock()
    seen: list[bool] = []
    matrix.matmul(matrix).numpy()

    def look() -> None:
        thread = MainThread(has_gpus=False)
        while lock.locked() and not any(seen):
            thread.seconds_to_wait(has_left=False)
            seen.append(thread.is_in_oneflow)
            time.sleep(0.02)

    with lock:
        watcher = threading.Thread(target=look)
        watcher.start()
        while is_oneflow and watcher.is_alive():
            matrix.matmul(matrix).sum().item()
        while len(seen) < 10 and watcher.is_alive():
            lock.acquire(timeout=0.5)
    watcher.join()
    assert any(seen) == is_oneflow
    assert len(seen) > 1


def report(kind: str, number: int, what: str, seconds: float, is_idle: bool = True) -> Report:
    return Report((number, kind, what), "train.py:3", seconds, is_idle)


def verdict(*reports: Report, world_size: int = 2, num_nodes: int = 1, has_gpus: bool = False) -> str:
    standstill = Standstill(world_size, num_nodes, has_gpus)
    for rank, each in enumerate(reports):
        standstill.note(rank, each, 100.0)
    return standstill.verdict(101.0)


SYNC, COMPARE = (COLLECTIVE, 5, "synchronize"), (COLLECTIVE, 5, "a comparison of 1 number(s)")
DIFFERENT = {
    "names": (SYNC, COMPARE, 31),
    "numbers": (SYNC, (COLLECTIVE, 6, "synchronize"), 31),
    "a batch": (SYNC, (BATCH, 4, "a batch of rank 0"), 31),
    "oneflow": (SYNC, (ONEFLOW, 4, "in OneFlow"), 31),
}


@pytest.mark.parametrize("case", list(DIFFERENT))
def test_ranks_in_different_places_are_named(case: str) -> None:
    first, second, seconds = DIFFERENT[case]
    found = verdict(report(*first, seconds), report(*second, seconds))
    assert f"{first[2]}, its collective number 5 (train.py:3) on rank 0, but {second[2]}" in found
    assert "on rank 1. Every rank must run the same collectives" in found


@pytest.mark.parametrize("case", list(DIFFERENT))
def test_they_are_given_time_first(case: str) -> None:
    first, second, seconds = DIFFERENT[case]
    assert not verdict(report(*first, 3600), report(*second, seconds - 2))
    assert not verdict(report(*first, seconds), report(*second, seconds), num_nodes=2)


def test_a_busy_loop_is_no_work_ranks_at_one_place_have_minutes_and_who_reports_nothing_works() -> None:
    assert verdict(report(*SYNC, 31), report(*COMPARE, 31, is_idle=False))
    assert not verdict(report(*SYNC, 290), report(*SYNC, 290))
    assert verdict(report(*SYNC, 301), report(*SYNC, 301))
    assert not verdict(report(*SYNC, 9999), report(*SYNC, 9999), num_nodes=2)
    assert not verdict(report(*SYNC, 9999), report(*COMPARE, 9999), world_size=3)


@pytest.mark.parametrize("has_gpus", [False, True])
def test_ranks_that_may_compute_are_left_alone(has_gpus: bool) -> None:
    working = report(ONEFLOW, 4, "in OneFlow", 250, is_idle=has_gpus)
    assert not verdict(report(*SYNC, 250), working, has_gpus=has_gpus)


def test_a_rank_that_was_stopped_may_continue() -> None:
    standstill = Standstill(2, 1, False)
    standstill.note(0, report(*SYNC, 100), 200.0)
    standstill.note(1, report(*COMPARE, 90), 189.0)
    assert not standstill.verdict(200.0)
    standstill.note(1, report(*COMPARE, 100), 199.0)
    assert standstill.verdict(200.0)


def test_each_wait_counts_from_its_own_beginning() -> None:
    own = OwnPlace()
    for begin in (0.0, 10.0):
        with own.at((1, COLLECTIVE, "synchronize")):
            assert own.report(begin, 1, False, True) is None
            found = own.report(begin + 8.0, 1, False, True)
        assert found is not None
        assert found.seconds == 8.0
        assert own.report(begin + 9.0, 1, False, True) is None


def test_a_main_thread_that_moves_within_oneflow_waits_anew() -> None:
    own = OwnPlace()
    for now in (0.0, 2.0, 4.0):
        last = own.report(now, 3, True, True)
    assert last is not None
    assert last.place == (3, ONEFLOW, "in OneFlow")
    assert own.report(6.0, 3, False, True) is None
    assert own.report(8.0, 3, True, True) is None
