"""`libai-data profile` measures a loader truly, and recommends what its measurements say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.commands.index import main as index
from libai_data.commands.inspection.inspection import inspect_config
from libai_data.commands.one_rank import mesh_of
from libai_data.commands.profile import Measurement, main, measure, recommend, worker_counts
from libai_data.config import LazyCall
from libai_data.errors import ConfigError
from libai_data.iterables import from_iterable
from libai_data.mesh.parallel_mesh import ParallelMesh
from tests.engine.tiny import tiny_config

CONFIG = str(Path(__file__).resolve().parents[1] / "engine" / "tiny_config.py")


def measured(rates: dict[int, float]) -> list[Measurement]:
    return [Measurement(workers, rate, (1e-5, 3e-4, 1e-6), 10 / rate, 2e-5) for workers, rate in rates.items()]


@given(st.integers(1, 300))
def test_counts_go_from_none_to_all_cores(most: int) -> None:
    counts = worker_counts(most)
    assert counts == sorted(set(counts)) and counts[0] == 0 and counts[-1] == most and len(counts) <= 16


@pytest.mark.parametrize(
    ("rates", "mesh", "readers", "overrides"),
    [
        # The fewest workers that are as fast as the best.
        ({0: 100, 1: 95.2, 2: 200, 3: 205, 4: 190}, ParallelMesh(1, 1, 1), "every_rank", ["num_workers=2"]),
        # Ranks that share the cores of a node share its workers.
        ({0: 10, 4: 100, 8: 200}, ParallelMesh(4, 1, 1), "every_rank", ["num_workers=2"]),
        ({0: 10, 4: 100, 8: 200}, ParallelMesh(8, 1, 1, num_nodes=4), "every_rank", ["num_workers=4"]),
        # One reader a node, where ranks need the same samples.
        ({0: 10, 4: 100}, ParallelMesh(2, 2, 1), "every_rank", ["num_workers=4", "readers=node"]),
        ({0: 10, 4: 100}, ParallelMesh(2, 2, 1), "node", ["num_workers=4"]),
    ],
)
def test_workers_and_readers_are_recommended(
    rates: dict[int, float], mesh: ParallelMesh, readers: str, overrides: list[str]
) -> None:
    found, reasons = recommend(measured(rates), mesh, readers)
    assert found == [f"dataloader.train.{override}" for override in overrides]
    assert any("'transform': 300 microseconds" in reason for reason in reasons)


class CountedLoader:
    """A batch of 10 takes 0.15 s of its own clock: 0.1 s in the stages, and 0.03 s in the trainer's thread."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            self.taken += 1
            yield {"x": np.zeros(10)}

    def stats(self) -> dict[str, Any]:
        return {
            "samples": 10 * self.taken,
            "source_seconds": 0.08 * self.taken,
            "transform_seconds": 0.02 * self.taken,
            "copy_seconds": 0.0,
        }

    def clock(self) -> float:
        return 0.15 * self.taken

    def busy(self) -> float:
        return 0.03 * self.taken


@pytest.mark.parametrize(("workers", "fixed"), [(0, 0.05), (2, 0.03)])
def test_the_rate_and_the_costs_are_those_of_the_loader_and_of_the_trainer_beside_it(
    workers: int, fixed: float
) -> None:
    loader = CountedLoader()
    found = measure(loader, workers, 1.5, loader.clock, loader.busy)
    assert found.rate == pytest.approx(10 / 0.15)
    assert found.batch == pytest.approx(0.15)
    assert found.seconds == pytest.approx((0.008, 0.002, 0))
    assert found.bottleneck == "source"
    assert found.fixed == pytest.approx(fixed)


def test_it_is_said_at_which_step_time_the_loader_stops_mattering() -> None:
    _, reasons = recommend(measured({0: 100, 2: 1000}), ParallelMesh(1, 1, 1))
    assert any(
        "Steps of 10 ms or longer for each batch do not wait for data" in reason
        and "fixed cost of a batch remains, 20 us: at most 1% of steps of 2 ms or longer" in reason
        for reason in reasons
    ), reasons
    # Two ranks share the cores, so that a batch takes each of them twice as long.
    _, reasons = recommend(measured({0: 100, 2: 1000}), ParallelMesh(2, 1, 1))
    assert any("Steps of 20 ms or longer for each batch" in reason for reason in reasons), reasons
    # One rank reads the batches of two data-parallel ranks.
    _, reasons = recommend(measured({0: 100, 2: 1000}), ParallelMesh(2, 2, 1), "node")
    assert any("Steps of 20 ms or longer for each batch" in reason for reason in reasons), reasons
    _, reasons = recommend(measured({0: 100}), ParallelMesh(2, 2, 1), "node")
    assert any("Without workers, a step waits 200 ms for each batch" in reason for reason in reasons), reasons
    _, reasons = recommend(measured({0: 100}), ParallelMesh(2, 1, 1))
    assert any("Without workers, a step waits 100 ms for each batch" in reason for reason in reasons), reasons
    _, reasons = recommend(measured({0: 100, 2: 100}), ParallelMesh(1, 1, 1))
    assert any("Without workers, a step waits 100 ms for each batch" in reason for reason in reasons), reasons
    assert any("at most 1% of steps of 10 s" in reason for reason in reasons), reasons


def no_samples() -> Iterator[Any]:
    return iter(())


def three_samples() -> Iterator[Any]:
    return iter([{"x": np.array(number)} for number in range(3)])


def test_a_finite_loader_is_measured_and_an_empty_one_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert measure(from_iterable(three_samples, 2), 0, 0.01).rate > 0
    source: Any
    for source in ([], no_samples):
        with pytest.raises(ConfigError, match=r"yields no batch; its dataset may be empty|list is empty"):
            measure(from_iterable(source, 2), 0, 0.01)


@pytest.mark.parametrize("source", [[], no_samples])
def test_an_empty_dataset_is_not_inspected(source: Any) -> None:
    cfg = tiny_config("unused")
    cfg.dataloader.train = LazyCall(from_iterable)(source=source)
    with pytest.raises(ConfigError, match=r"there is no step 0: .* its dataset is empty|list is empty"):
        inspect_config(cfg)


def test_without_ranks_the_mesh_is_the_least_that_the_config_allows() -> None:
    cfg = tiny_config("unused")
    assert mesh_of(cfg).world_size == 1
    cfg.train.dist.update(tensor_parallel_size=2, data_parallel_size=None)
    assert (mesh_of(cfg).data_parallel_size, mesh_of(cfg).tensor_parallel_size) == (1, 2)
    assert mesh_of(cfg, ranks=8).data_parallel_size == 4


def test_the_command_measures_each_setting_and_prints_an_override(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [CONFIG, "--seconds", "0.05", "--workers", "0", "1", "--ranks", "2"]
    assert main([*arguments, "train.dist.tensor_parallel_size=2"]) == 0
    shown = capsys.readouterr().out
    for workers in (0, 1):
        assert re.search(rf"^ +{workers} +[\d,]+ .* (source|transform|copy)$", shown, re.MULTILINE), shown
    assert re.search(
        r"^Recommended: dataloader.train.num_workers=[01] dataloader.train.readers=node$", shown, re.MULTILINE
    )


MODULE = """
from libai_data import DataLoader, DataModule
from libai_data.config import LazyCall
from tests.engine.tiny import TinyDataset
from tests.engine.tiny_config import graph, model, optim, train


class Points(DataModule):
    def train_dataloader(self):
        return DataLoader(TinyDataset(), 8, num_workers=1)


datamodule = LazyCall(Points)()
"""


def test_workers_that_a_data_module_sets_are_not_measured_as_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    arguments = [str(tmp_path / "module.py"), "--seconds", "0.05", "--workers"]
    for workers in (["0"], ["1", "2"]):
        assert main([*arguments, *workers]) == 0
        lines = capsys.readouterr().out.splitlines()
        measured = [line.split()[0] for line in lines if line.startswith("      ")]
        assert measured == ["1"] and "No other number of workers was measured" in lines[-1], lines
    assert main([*arguments, "1"]) == 0
    assert "Recommended: dataloader.train.num_workers=1" in capsys.readouterr().out


STREAMED = """
from libai_data.config import LazyCall
from tests.engine.test_streamed_training import LANES, CyclicSampler, Points
from tests.engine.tiny_config import dataloader, graph, model, optim, train

dataloader.train.dataset = LazyCall(Points)(paths="file://{folder}", streaming=True)
dataloader.train.sampler = LazyCall(CyclicSampler)(**LANES)
"""


def test_of_a_streamed_source_rate_hits_and_bytes_ahead_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shards").mkdir()
    for number in range(4):
        # So few that each batch has several epochs.
        np.save(tmp_path / "shards" / f"{number}.npy", np.ones((1, 4), np.float32))
    monkeypatch.setenv("LIBAI_DATA_CACHE_DIR", str(tmp_path / "cache"))
    assert index([f"file://{tmp_path / 'shards'}"]) == 0
    (tmp_path / "streamed.py").write_text(STREAMED.format(folder=tmp_path / "shards"))
    assert main([str(tmp_path / "streamed.py"), "--seconds", "0.01", "--workers", "0", "0"]) == 0
    first, again = re.findall(r"^ +streaming: (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert re.fullmatch(r"4 shard files fetched \([\d.]+ K?B/s\), \d+ were in the cache, [\d.]+ K?B ahead", first)
    assert re.fullmatch(r"0 shard files fetched \(0 B/s\), \d+ were in the cache, [\d.]+ K?B ahead", again)
