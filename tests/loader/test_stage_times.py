"""Where the time goes: `loader.stats()`, and the hint in the log when the trainer waits for data."""

from __future__ import annotations

import logging
import time
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from libai_data.data.transforms.timing import take_transform_time, transform_time
from libai_data.loader import iteration
from libai_data.loader.stage_times import LoaderTimes, StageTimes, summary
from tests.deadline import wait_until
from tests.loader.sample_datasets import Failing, Numbers, Slow, stack_dicts
from tests.loader.streams import WORKER_NAMES, WORKERS, loading
from tests.properties import slowly

EVERYWHERE = pytest.mark.parametrize("workers", [*WORKERS[:3], slowly(WORKERS[3])], ids=WORKER_NAMES)


class SlowTransform(Numbers):
    """20 ms in a transform, 1 ms in the source."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.001)
        with transform_time():
            time.sleep(0.02)
        return super().__getitem__(index)


class LargeRows(Numbers):
    """Costs nothing but the copy: about 20 ms, because it goes along the columns."""

    row = np.zeros((2048, 2048), np.uint8).T

    def __getitem__(self, index: int) -> Any:
        return {"row": self.row}


def train_slowly(loader: Any, monkeypatch: Any) -> None:
    """Take batches, each when those ahead have been read, on a clock that runs only between two batches."""
    seconds = [0.0]
    monkeypatch.setattr(iteration, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    for _ in islice(loader, 12):
        wait_until(lambda: loader._reader.is_done(loader._iteration._pending[-1]), "batch")
        time.sleep(0.05)
        seconds[0] += 1


@EVERYWHERE
def test_stats_tell_source_from_transform_from_copy(workers: dict[str, Any]) -> None:
    with loading(SlowTransform(), prefetch=1, **workers) as loader:
        assert loader.stats()["batches"] == 0
        for _ in islice(loader, 10):
            pass
        stats = loader.stats()
    assert stats["batches"] == 10
    assert 36 <= stats["samples"] <= 48
    assert stats["transform_seconds"] >= 0.02 * 36
    assert 0.001 * 36 <= stats["source_seconds"] < stats["transform_seconds"]
    assert stats["copy_seconds"] >= 0
    assert stats["bottleneck"] == "transform"
    assert stats["waiting_share"] > 0.5


@EVERYWHERE
def test_copying_can_be_the_bottleneck(workers: dict[str, Any]) -> None:
    with loading(LargeRows(), prefetch=1, **workers) as loader:
        for _ in islice(loader, 4):
            pass
        stats = loader.stats()
    assert stats["copy_seconds"] > stats["source_seconds"]
    assert stats["bottleneck"] == "copy"


@pytest.mark.parametrize("workers", WORKERS[1:3], ids=WORKER_NAMES[1:3])
def test_a_slow_trainer_is_named_as_the_bottleneck(workers: dict[str, Any], monkeypatch: Any) -> None:
    with loading(Numbers(), **workers) as loader:
        train_slowly(loader, monkeypatch)
        stats = loader.stats()
    assert stats["bottleneck"] == "trainer"
    assert stats["waiting_share"] == 0
    assert stats["waiting_for_trainer_seconds"] > 0.3


@EVERYWHERE
def test_waiting_for_workers_is_counted(workers: dict[str, Any]) -> None:
    with loading(Slow(64, 0.005), prefetch=1, **workers) as loader:
        for _ in islice(loader, 8):
            pass
        stats = loader.stats()
    # Each batch takes 20 ms, which two workers share; on a busy machine, the trainer may ask late for some.
    assert stats["waiting_for_workers_seconds"] > 0.02
    assert stats["bottleneck"] == "source"


@EVERYWHERE
def test_stats_go_on_over_rounds_and_breaks(workers: dict[str, Any]) -> None:
    with loading(Failing(64, [3]), on_error="skip", collate_fn=stack_dicts, **workers) as loader:
        for _ in range(3):
            for _ in islice(loader, 2):
                pass
        stats = loader.stats()
    assert stats["batches"] == 6
    assert stats["skipped_samples"] >= 1
    assert stats["samples"] >= 24


def test_a_hint_is_logged_when_the_trainer_waits(monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(iteration, "_SECONDS_BETWEEN_HINTS", 0.05)
    caplog.set_level(logging.INFO, "libai_data")
    with loading(SlowTransform(), num_workers=1, worker_type="thread") as loader:
        for _ in islice(loader, 15):
            pass
    hints = [record.getMessage() for record in caplog.records if "waited for data" in record.getMessage()]
    assert hints
    assert "'transform'" in hints[-1]
    assert "loader.stats()" in hints[-1]


def test_no_hint_is_logged_when_the_trainer_does_not_wait(monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(iteration, "_SECONDS_BETWEEN_HINTS", 0.0)
    caplog.set_level(logging.INFO, "libai_data")
    with loading(Numbers(), num_workers=1, worker_type="thread") as loader:
        train_slowly(loader, monkeypatch)
    assert not [record for record in caplog.records if "waited for data" in record.getMessage()]


def test_a_fresh_loader_has_waited_for_nothing_and_transform_time_is_taken_once() -> None:
    figures = summary(StageTimes(), LoaderTimes())
    assert figures["waiting_share"] == 0
    assert figures["bottleneck"] == "trainer"
    take_transform_time()
    for _ in range(2):
        with transform_time():
            time.sleep(0.002)
    assert take_transform_time() >= 0.004
    assert take_transform_time() == 0
