"""Each suite measures what it says, on little work; what it compares is the same."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libai_data.data.datasets.gpt import GPTDataset
from libai_data.data.sources import ArrayRecordSource, ParquetSource, WebDatasetSource
from libai_data.delivery.read_plan import READERS, ReadPlan
from tests.deadline import run_to_end
from tools.benchmarks.deliveries import CONTENDERS
from tools.benchmarks.ranks import Ranks, RanksError
from tools.benchmarks.rows import Measured, Row, Scale, measure
from tools.benchmarks.samples import TOKENS, GptTokens, MappedImages, PlainTokens
from tools.benchmarks.suites import delivery, loader, plan, records, state, streaming, text, text_preprocess, training
from tools.benchmarks.works import FlowSamples, write_images, write_tokens


def measured_once(row: Row) -> Measured:
    """A row's measurements, of which none may be missing but MosaicML's, nor a claim without an answer."""
    measured = measure(row, 1, lambda _: None, settle=0)
    assert set(measured.missing) <= {"streaming"}
    assert all(values[0] > 0 or row.name == "waiting" for values in measured.values.values())
    verdicts = [claim.judge(measured.values, measured.missing) for claim in row.claims]
    assert all(verdict.value is not None or verdict.reason in measured.missing.values() for verdict in verdicts)
    return measured


def keeps_its_limits(measured: Measured) -> bool:
    return all(claim.judge(measured.values, {}).met for claim in measured.row.claims)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "names", "packages"),
    [
        (records, ["array_record", "tar", "parquet"], ["array_record", "pyarrow"]),
        (streaming, ["cold", "waiting", "nodes", "cached", "fetched"], ["aiohttp"]),
        (text_preprocess, ["preprocess-1", "preprocess-2", "bert", "t5"], ["tokenizers"]),
        (text, ["index-shuffled", "index-packed", "gpt-0", "gpt-shuffled", "gpt-packed"], []),
        (training, ["digits-4", "gpt-1"], ["sklearn"]),
        (loader, ["plain-0", "read_batch-2", "images-0", "first_batch", "memory"], []),
    ],
)
def test_a_suite_measures_its_rows(suite: Any, names: list[str], packages: list[str], tmp_path: Path) -> None:
    for package in packages:
        pytest.importorskip(package)
    rows = {row.name: row for row in suite.rows(Scale(quick=True, seconds=0.0, folder=tmp_path))}
    for name in names:
        measured = measured_once(rows[name])
        if name.startswith("index"):
            assert keeps_its_limits(measured)


@pytest.mark.slow
def test_restoring_is_measured_at_step_one_million_and_the_state_is_small(tmp_path: Path) -> None:
    _, size = map(measured_once, state.rows(Scale(quick=True, seconds=0.0, folder=tmp_path)))
    assert keeps_its_limits(size)
    for make in (state._plain, state._with_ramp_and_skips):
        restored = make()
        restored.load_state_dict(state._state(make))
        assert restored.stream.state.step == 10**6


def test_following_the_plan_takes_little_memory(tmp_path: Path) -> None:
    step, memory = map(measured_once, plan.rows(Scale(quick=True, seconds=0.0, folder=tmp_path)))
    assert keeps_its_limits(memory), memory.values
    assert set(step.values) == set(READERS)


@pytest.mark.parametrize("readers", READERS)
def test_the_reader_that_is_measured_serves_those_that_it_is_said_to(readers: str) -> None:
    read = ReadPlan(plan.mesh_of_rank(0), readers)
    batch = plan.reader(readers).batch_at(0)
    assert batch is not None
    served = plan.served_by(read)
    assert len(batch.indices) == plan.ROWS * len({read.mesh.shard_of(rank) for rank in served})
    assert len(served) == {"every_rank": 1, "node": 8, "rank0": 1024}[readers]


def test_the_record_readers_that_are_compared_read_the_same(tmp_path: Path) -> None:
    for package in ("array_record", "pyarrow"):
        pytest.importorskip(package)
    files, indices = records._Files(tmp_path, 2000), [5, 1999, 0]
    array_record, tar, parquet = (files.path(kind) for kind in ("array_record", "tar", "parquet"))
    expected = ArrayRecordSource(array_record).read_many(indices)
    assert list(records._array_record_reader(array_record)(indices)) == expected
    assert records._tarfile(tar)(indices) == expected
    assert [sample["bin"] for sample in WebDatasetSource(tar).read_many(indices)] == expected
    assert [row["record"] for row in ParquetSource(parquet).read_many(indices)] == expected
    assert sorted(row["record"] for row in records._parquet_row_groups(parquet)(indices)) == sorted(expected)


def test_the_gpt_samples_that_are_compared_are_the_same(tmp_path: Path) -> None:
    prefix = text.write_corpus(tmp_path / "corpus", 10**5)
    ours, theirs = GPTDataset(prefix, TOKENS), GptTokens(f"{prefix}.bin")
    assert len(ours) == len(theirs) > 50
    for index in (0, 7, len(ours) - 1):
        for name, array in theirs[index].items():
            np.testing.assert_array_equal(ours[index].get(name).tensor, array)


def test_oneflow_and_other_processes_get_the_same_samples(tmp_path: Path) -> None:
    tokens = PlainTokens(str(write_tokens(tmp_path / "tokens.bin", 4)))
    images = MappedImages(str(write_images(tmp_path / "images.npy", 2)))
    for ours in (tokens, images):
        copy, theirs = pickle.loads(pickle.dumps(ours)), FlowSamples(ours)
        assert len(pickle.dumps(ours)) < 1000 and len(copy) == len(theirs) == len(ours)
        for name, array in ours[1].items():
            assert np.array_equal(theirs[1].get(name).tensor.numpy(), array)
            assert np.array_equal(copy[1][name], array)


def test_the_ranks_can_measure_every_contender_and_no_other(tmp_path: Path) -> None:
    rows = [row for suite in (delivery, training) for row in suite.rows(Scale(True, 0.1, tmp_path))]
    named = [f"{row.name}/{each.name}" for row in rows for each in row.contenders]
    assert sorted(named) == sorted(CONTENDERS)


@pytest.mark.slow
def test_the_tool_measures_on_four_ranks(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(repository / "tools" / "benchmark.py"), "delivery", "--quick", "--rounds", "1"]
    result = tmp_path / "result.json"
    command += ["--only", "tokens", "--json", str(result)]
    done = run_to_end(command, 400, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {row["name"]: row["values"] for row in json.loads(result.read_text())["rows"]}
    assert {name: sorted(values) for name, values in found.items()} == {
        "tokens": ["libai_data", "to_global"],
    }
    assert all(len(each) == 1 and min(each) > 0 for values in found.values() for each in values.values())


def test_a_rank_that_fails_is_reported_with_its_traceback(tmp_path: Path) -> None:
    with Ranks(1) as ranks, pytest.raises(RanksError, match=r"(?s)rank 0 failed.*KeyError: 'nothing'"):
        ranks.tell("nothing")
