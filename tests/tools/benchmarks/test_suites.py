"""Each suite measures what it says, on little work; what it compares is the same."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from libai_data.data.datasets.gpt import GPTDataset
from libai_data.data.sources import IndexedSource
from libai_data.delivery.read_plan import READERS, ReadPlan
from tools.benchmarks.deliveries import CONTENDERS, seconds_a_step
from tools.benchmarks.photographs import write_photographs
from tools.benchmarks.ranks import Ranks, RanksError
from tools.benchmarks.rows import AtLeast, AtMost, Measured, Row, Scale, measure
from tools.benchmarks.samples import IMAGE_SHAPE, TOKEN_FIELDS, TOKENS, GptTokens, MappedImages, PlainTokens
from tools.benchmarks.suites import delivery, loader, plan, records, state, streaming, text, text_preprocess, training
from tools.benchmarks.works import FlowSamples, LongTokens, ReadyImages, TokenBatches, write_images, write_tokens


def measured_once(row: Row) -> Measured:
    """A row's measurements, of which none may be missing, nor a claim without an answer."""
    measured = measure(row, 1, lambda _: None, settle=0)
    assert not measured.missing
    assert all(values[0] > 0 for values in measured.values.values())
    assert all(claim.judge(measured.values, {}).value is not None for claim in row.claims)
    return measured


def keeps_its_limits(measured: Measured) -> bool:
    return all(claim.judge(measured.values, {}).met for claim in measured.row.claims)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "names", "packages"),
    [
        (records, ["array_record", "tar", "parquet"], ["array_record", "pyarrow"]),
        (streaming, ["cached", "fetched"], ["aiohttp"]),
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


def test_photographs_are_alike_but_not_the_same(tmp_path: Path) -> None:
    files = list(write_photographs(tmp_path, 16).rglob("*.jpg"))
    assert len({path.read_bytes() for path in files}) == 16
    for path in files:
        with Image.open(path) as image:
            assert 400 < image.width < 640 and 330 < image.height < 420


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
    assert len(batch.indices) == plan.ROWS * len({read.shard_of(rank) for rank in served})
    assert len(served) == {"every_rank": 1, "node": 8, "rank0": 1024}[readers]


def test_the_record_readers_that_are_compared_read_the_same(tmp_path: Path) -> None:
    for package in ("array_record", "pyarrow"):
        pytest.importorskip(package)
    files, indices = records._Files(tmp_path, 2000), [5, 1999, 0]
    array_record, tar, parquet = (files.path(kind) for kind in ("array_record", "tar", "parquet"))
    expected = records.ArrayRecordSource(array_record).read_many(indices)
    assert list(records._array_record_reader(array_record)(indices)) == expected
    assert records._tarfile(tar)(indices) == expected
    assert [sample["bin"] for sample in records.WebDatasetSource(tar).read_many(indices)] == expected
    assert [row["record"] for row in records.ParquetSource(parquet).read_many(indices)] == expected
    assert sorted(row["record"] for row in records._parquet_row_groups(parquet)(indices)) == sorted(expected)


def test_the_gpt_samples_that_are_compared_are_the_same(tmp_path: Path) -> None:
    prefix = text.write_corpus(tmp_path / "corpus", 10**5)
    ours, theirs = GPTDataset(prefix, text.LENGTH), GptTokens(f"{prefix}.bin")
    assert len(ours) == len(theirs) > 50
    for index in (0, 7, len(ours) - 1):
        for name, array in theirs[index].items():
            np.testing.assert_array_equal(ours[index].get(name).tensor, array)


def test_the_synthesised_lengths_are_an_index_like_any_other(tmp_path: Path) -> None:
    source = IndexedSource(text.write_lengths(tmp_path / "many", 1000))
    assert source.num_documents == 1000
    assert 0.9e6 < len(source.tokens) < 1.1e6


def test_a_batch_read_together_holds_the_samples_read_one_by_one(tmp_path: Path) -> None:
    dataset = TokenBatches(str(write_tokens(tmp_path / "tokens.bin", 64)))
    indices = np.array([5, 0, 63, 5])
    out = {name: np.zeros((4, TOKENS), np.int64) for name in TOKEN_FIELDS}
    dataset.read_batch(indices, out)
    for row, index in enumerate(indices.tolist()):
        for name, array in dataset[index].items():
            assert out[name][row].tolist() == array.tolist()


def test_oneflow_and_other_processes_get_the_same_samples(tmp_path: Path) -> None:
    tokens = PlainTokens(str(write_tokens(tmp_path / "tokens.bin", 4)))
    images = MappedImages(str(write_images(tmp_path / "images.npy", 2)))
    for ours in (tokens, images):
        copy, theirs = pickle.loads(pickle.dumps(ours)), FlowSamples(ours)
        assert len(pickle.dumps(ours)) < 1000 and len(copy) == len(theirs) == len(ours)
        for name, array in ours[1].items():
            assert np.array_equal(theirs[1].get(name).tensor.numpy(), array)
            assert np.array_equal(copy[1][name], array)


def test_a_long_dataset_repeats_its_samples(tmp_path: Path) -> None:
    dataset = LongTokens(str(write_tokens(tmp_path / "tokens.bin", 4)))
    assert len(dataset) == 10**8
    assert np.array_equal(dataset[10**8 - 1]["labels"], dataset[3]["labels"])


DEMANDS = {
    "tokens": "libai_data / to_global >= 20 x",
    "images": "libai_data / to_global >= 2.5 x",
    "rank0-4x1": "libai_data / guide >= 8 x",
    "rank0-2x2": "libai_data / guide >= 8 x",
    "jpeg-1x4": "node / every_rank >= 3.5 x",
    "jpeg-2x2": "node / every_rank >= 1.8 x",
    "checks": "tokens <= 1 %, images <= 1 %",
}


def test_the_rows_demand_what_was_promised(tmp_path: Path) -> None:
    found = {}
    for row in delivery.rows(Scale(True, 0.1, tmp_path)):
        claims = [
            f"{claim.contender} / {claim.than} {claim.demand}"
            if isinstance(claim, AtLeast)
            else f"{claim.contender} {claim.demand}"
            for claim in row.claims
        ]
        found[row.name] = ", ".join(claims)
        for claim in row.claims:
            names = {contender.name for contender in row.contenders}
            assert {claim.contender, getattr(claim, "than", claim.contender)} <= names
            assert isinstance(claim, (AtLeast, AtMost))
    assert found == DEMANDS


def test_the_ranks_can_measure_every_contender_and_no_other(tmp_path: Path) -> None:
    rows = [row for suite in (delivery, training) for row in suite.rows(Scale(True, 0.1, tmp_path))]
    named = [f"{row.name}/{each.name}" for row in rows for each in row.contenders]
    assert sorted(named) == sorted(CONTENDERS)


def test_a_step_is_timed_over_as_many_steps_as_fit() -> None:
    steps = []
    seconds = seconds_a_step(lambda: steps.append(1), 0.5)
    assert len(steps) > 20
    assert 0 < seconds < 0.01


def test_ready_images_write_to_new_memory_only() -> None:
    dataset = ReadyImages()
    out: dict[str, np.ndarray] = {"images": np.zeros((2, *IMAGE_SHAPE), np.float32), "labels": np.zeros(2, np.int64)}
    dataset.read_batch(np.array([3, 4]), out)
    assert out["images"].min() == 1
    assert out["labels"].tolist() == [3, 4]
    out["images"][0] = 5
    dataset.read_batch(np.array([6, 7]), out)
    assert out["images"][0].max() == 5
    assert set(ReadyImages(labels=False)[0]) == {"images"}


@pytest.mark.slow
def test_the_tool_measures_on_four_ranks(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(repository / "tools" / "benchmark.py"), "delivery", "--quick", "--rounds", "1"]
    result = tmp_path / "result.json"
    command += ["--only", "tokens", "--json", str(result)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    found = {row["name"]: row["values"] for row in json.loads(result.read_text())["rows"]}
    assert {name: sorted(values) for name, values in found.items()} == {
        "tokens": ["libai_data", "to_global"],
    }
    assert all(len(each) == 1 and min(each) > 0 for values in found.values() for each in values.values())


def test_a_rank_that_fails_is_reported_with_its_traceback(tmp_path: Path) -> None:
    with Ranks(1) as ranks, pytest.raises(RanksError, match=r"(?s)rank 0 failed.*KeyError: 'nothing'"):
        ranks.tell("nothing")
