"""Samples that fail: they end the run with all that is known, or are replaced, everywhere by the same ones."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai_data import DataLoader
from libai_data.data.random.global_generators import GlobalDraws
from libai_data.data.random.substitute import SUBSTITUTES, substitute_index
from libai_data.data.samplers import CyclicSampler, SingleRoundSampler
from libai_data.errors import ConfigError, DataPipelineError, SampleError, SchemaError
from libai_data.loader.failures import ErrorPolicy, read_quarantine
from tests.full_disk import fill, small_disk
from tests.loader.odd_datasets import Mixed, MixedFilled, MixedTogether
from tests.loader.sample_datasets import (
    ExitingPolitely,
    Failing,
    FailingFilled,
    Leaving,
    NumberDicts,
    Numbers,
    Panicking,
    PanickingFilled,
    Unspeakable,
    failing_collator,
    panicking_collator,
    stack_dicts,
)
from tests.loader.streams import WORKER_NAMES, WORKERS, content, loading, stream
from tests.properties import examples, slowly

EVERYWHERE = pytest.mark.parametrize("workers", [*WORKERS[:3], slowly(WORKERS[3])], ids=WORKER_NAMES)
WITHOUT_SPAWN = pytest.mark.parametrize("workers", WORKERS[:3], ids=WORKER_NAMES[:3])
DATASETS = pytest.mark.parametrize("dataset", [Failing, FailingFilled])


def indices_of(found: list[Any]) -> list[int]:
    return [index for _, fields in found for index in np.frombuffer(fields["index"][2], np.int64).tolist()]


@EVERYWHERE
def test_a_failing_sample_ends_the_run_with_its_traceback(workers: dict[str, Any]) -> None:
    with loading(Failing(bad=[9]), **workers) as loader:
        iterator = iter(loader)
        assert [content(next(iterator)) for _ in range(2)] == stream(Numbers(), batches=2)
        with pytest.raises(SampleError, match=r"sample 9 of Failing: KeyError: 'no picture 9'") as raised:
            next(iterator)
        text = str(raised.value) + repr(raised.value.__cause__)
        assert "KeyError" in text
        if "start_method" in workers:
            assert re.search(r"Traceback of worker \d \(process \d+\)", text)
            assert 'sample_datasets.py", line' in text
            assert 'raise KeyError(f"no picture {index}")' in text
        with pytest.raises(SampleError, match="sample 9 of Failing"):
            next(iterator)


@EVERYWHERE
@pytest.mark.parametrize("arguments", [{}, {"collate_fn": stack_dicts}], ids=["stacked", "collated"])
def test_an_exception_that_cannot_be_shown_keeps_its_sample(workers: dict[str, Any], arguments: Any) -> None:
    with pytest.raises(SampleError, match=r"sample 9 of Unspeakable: Speechless: .*__str__ raises ValueError"):
        stream(Unspeakable(bad=[9]), batches=3, **arguments, **workers)


@WITHOUT_SPAWN
@pytest.mark.parametrize("dataset", [Panicking, PanickingFilled])
def test_what_a_library_in_rust_raises_is_a_failure_of_the_sample(workers: dict[str, Any], dataset: Any) -> None:
    with pytest.raises(SampleError, match=r"9.* of Panicking.*: PanicException: range end index 9"):
        stream(dataset(bad=[9]), batches=4, **workers)
    bad = [0, 9]
    for arguments in ({}, {"collate_fn": stack_dicts}):
        found = stream(dataset(bad=bad), batches=16, on_error="skip", **arguments, **workers)
        assert indices_of(found) == indices_of(stream(Failing(bad=bad), batches=16, on_error="skip"))


@EVERYWHERE
def test_a_first_sample_that_fails_is_told_in_the_same_way(workers: dict[str, Any]) -> None:
    with pytest.raises(SampleError, match=r"sample 0 of Failing: KeyError: 'no picture 0'"):
        stream(Failing(bad=[0]), batches=1, **workers)


@EVERYWHERE
def test_after_a_failure_the_loader_can_go_on_from_its_last_batch(workers: dict[str, Any]) -> None:
    with loading(Failing(bad=[13]), **workers) as loader:
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        with pytest.raises(SampleError):
            next(iterator)
        assert loader.state_dict()["position"] == 12
        loader.load_state_dict({**loader.state_dict(), "position": 16})
        assert [content(batch) for batch in islice(loader, 3)] == stream(Numbers(), batches=7)[4:]


@EVERYWHERE
@pytest.mark.parametrize(
    ("collate_fn", "error"), [(failing_collator, "ZeroDivisionError"), (panicking_collator, "PanicException")]
)
def test_a_failing_collator_names_its_samples(workers: dict[str, Any], collate_fn: Any, error: str) -> None:
    with pytest.raises(DataPipelineError, match=rf"{collate_fn.__name__} of samples \[4, 5, 6, 7\]: {error}"):
        stream(NumberDicts(), batches=3, collate_fn=collate_fn, **workers)


@WITHOUT_SPAWN
def test_failing_read_batch_names_samples(workers: dict[str, Any]) -> None:
    with pytest.raises(SampleError, match=r"one of the samples \[.*9.*\] of FailingFilled: KeyError"):
        stream(FailingFilled(bad=[9]), batches=4, **workers)


@WITHOUT_SPAWN
def test_a_dataset_that_exits_the_interpreter_ends_neither_its_worker_nor_the_trainer(workers: dict[str, Any]) -> None:
    with pytest.raises(SampleError, match=r"(?s)9.*SystemExit: goodbye"):
        stream(ExitingPolitely(bad=[9]), batches=4, **workers)
    with pytest.raises(SampleError, match=r"(?s)0.*SystemExit: goodbye"):
        stream(ExitingPolitely(bad=[0]), batches=1, **workers)
    with pytest.raises(SampleError, match=r"(?s)9.*GeneratorExit: left"):
        stream(Leaving(bad=[9]), batches=4, on_error="skip", **workers)


@EVERYWHERE
@DATASETS
@pytest.mark.parametrize("collate_fn", [None, stack_dicts])
def test_skipping_takes_the_same_substitutes_everywhere(workers: dict[str, Any], dataset: Any, collate_fn: Any) -> None:
    arguments: dict[str, Any] = {"on_error": "skip", "seed": 5, "collate_fn": collate_fn}
    bad = [0, 7, 8, 30, 31]
    found = stream(dataset(bad=bad), batches=40, **arguments, **workers)
    expected = stream(Failing(bad=bad), batches=40, **arguments)
    assert indices_of(found) == indices_of(expected)
    if collate_fn is None:
        assert found == expected
    for place, index in enumerate(indices_of(found)):
        epoch, asked = divmod(place, 64)
        if asked in bad:
            assert index in [substitute_index(5, epoch, asked, attempt, 64) for attempt in range(5)]
            assert index not in bad
        else:
            assert index == asked


@settings(max_examples=examples(20))
@given(
    bad=st.sets(st.integers(0, 29), max_size=20),
    ranks=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 2**40),
    prefetch=st.integers(1, 4),
)
def test_substitutes_are_the_same_on_every_layout(bad: Any, ranks: int, seed: int, prefetch: int) -> None:
    dataset = Failing(30, sorted(bad))
    whole = stream(dataset, CyclicSampler(dataset, 6, True, seed=seed), 12, on_error="skip", seed=seed)
    parts = [
        stream(
            dataset,
            CyclicSampler(dataset, 6 // ranks, True, 0, rank, ranks, seed=seed),
            12,
            on_error="skip",
            seed=seed,
            num_workers=2,
            worker_type="thread",
            prefetch=prefetch,
        )
        for rank in range(ranks)
    ]
    for step, (_, fields) in enumerate(whole):
        for name in fields:
            assert fields[name][2] == b"".join(part[step][1][name][2] for part in parts)


def test_skipping_watches_the_generators_once_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    around, watched, read = GlobalDraws.around, [], []

    class Reading(Failing):
        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return super().__getitem__(index)

    def counted(draws: GlobalDraws, *arguments: Any) -> Any:
        watched.append(draws)
        return around(draws, *arguments)

    monkeypatch.setattr(GlobalDraws, "around", counted)
    counts = []
    for on_error in ("raise", "skip"):
        watched.clear()
        stream(Failing(), batches=8, on_error=on_error)
        counts.append(len(watched))
    assert counts[0] == counts[1]
    [(_, fields)] = stream(Reading(bad=[2, 5]), CyclicSampler(Failing(), 8), 1, on_error="skip", seed=5, check_every=0)
    found = indices_of([(None, fields)])
    # A sample that fails is not read again, and neither are those before it.
    assert read == [0, 1, 2, found[2], 3, 4, 5, found[5], 6, 7]


@EVERYWHERE
def test_skipped_samples_are_counted_and_logged_once(workers: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    dataset = Failing(16, bad=[3, 10])
    with loading(dataset, SingleRoundSampler(dataset, 4), on_error="skip", **workers) as loader:
        for _ in range(3):
            assert sum(1 for _ in loader) == 4
        assert loader.stats()["skipped_samples"] == 6
    logged = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(logged) == 2
    assert all("of Failing" in text and "KeyError" in text and "instead" in text for text in logged)
    assert {int(text.split()[2]) for text in logged} == {3, 10}


@EVERYWHERE
@pytest.mark.parametrize("collate_fn", [None, stack_dicts])
def test_a_dataset_of_bad_samples_alone_ends_the_run(workers: dict[str, Any], collate_fn: Any) -> None:
    with pytest.raises(SampleError, match=f"no picture.*{SUBSTITUTES} samples that were read instead failed as well"):
        stream(Failing(bad=range(64)), batches=1, on_error="skip", collate_fn=collate_fn, **workers)


@EVERYWHERE
@DATASETS
def test_quarantine_writes_a_file_that_can_be_fed_back(workers: dict[str, Any], dataset: Any, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "bad.jsonl"
    arguments: dict[str, Any] = {"on_error": "quarantine", "quarantine_file": str(path), **workers}
    found = stream(dataset(bad=[2, 40]), batches=32, **arguments)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(line["index"] for line in lines) == [2, 40]
    assert all("no picture" in line["error"] for line in lines)
    assert read_quarantine(path) == {2, 40}
    # Those listed are not even tried, and the substitutes stay the same.
    path.write_text(path.read_text() + json.dumps({"index": 5, "error": "looks wrong"}) + "\n")
    again = stream(dataset(), batches=32, **arguments)
    asked = indices_of(stream(Numbers(), batches=32))
    for was, now, index in zip(indices_of(found), indices_of(again), asked):
        assert (now != 5) if index == 5 else (now == was or was == 5)
    assert len(path.read_text().splitlines()) == 3


def test_a_full_disk_loses_lines_of_the_quarantine_file_but_no_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        path = disk / "deep" / "bad.jsonl"
        arguments: dict[str, Any] = {"on_error": "quarantine", "quarantine_file": str(path)}
        expected = indices_of(stream(Failing(bad=[2]), batches=32, **arguments))
        # Only a part of the next line has room.
        path.write_text((path.read_text() * 100)[:4096].rpartition("\n")[0] + "\n")
        ballast, before = fill(disk), path.read_text()
        found = stream(Failing(bad=[2, 40, 41]), batches=32, **arguments)
        assert indices_of(found)[:2] == expected[:2] and len(found) == 32
        assert path.read_text() == before
        assert f"Samples are skipped, but cannot be listed in {path} (No space left on device)" in caplog.text
        assert read_quarantine(path) == {2}
        ballast.unlink()
        stream(Failing(bad=[2, 40, 41]), batches=32, **arguments)
        assert read_quarantine(path) == {2, 40, 41}


@WITHOUT_SPAWN
def test_a_quarantine_file_is_fed_to_skip_as_well(workers: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"index": 5}\n')
    found = indices_of(stream(Numbers(), batches=16, on_error="skip", quarantine_file=str(path), **workers))
    assert 5 not in (found[5], *found[6:])
    assert path.read_text() == '{"index": 5}\n'


@pytest.mark.parametrize("line", ["", "[5]", '{"indices": 5}', '{"index": "five"}', "garbage", "\udcff"])
def test_a_malformed_quarantine_file_is_refused_with_its_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"index": 5}\n' + line + "\n", errors="surrogateescape")
    with pytest.raises(ConfigError, match=r"bad\.jsonl, line 2"):
        ErrorPolicy("skip", str(path))


def test_a_pipe_in_place_of_a_quarantine_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"pipe is a device, a pipe or a socket; give the path of a file"):
        ErrorPolicy("skip", str(tmp_path / "pipe"))


def refuse_all(samples: list[Any]) -> Any:
    raise ValueError("refused")


@pytest.mark.parametrize("size", [1000, 5000])
def test_the_error_about_a_large_batch_names_a_thousand_samples_and_their_number(size: int) -> None:
    loader = DataLoader([{"x": number} for number in range(size)], size, collate_fn=refuse_all)
    with pytest.raises(
        SampleError, match=r"of samples \[0, 1, 2, .* 999(, \.\.\.; 5000 in all)?\]: ValueError: refused"
    ):
        next(iter(loader.numpy()))


def test_policies_are_checked() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'skip'"):
        ErrorPolicy("skipp")
    with pytest.raises(ConfigError, match="needs quarantine_file"):
        ErrorPolicy("quarantine")


KINDS_OF_MIXED = [
    *itertools.product(WORKERS[:3], [Mixed, MixedTogether, MixedFilled], ["skip"]),
    (WORKERS[3], Mixed, "skip"),
    (WORKERS[2], MixedFilled, "raise"),
    (WORKERS[0], Mixed, "raise"),
]


@pytest.mark.parametrize(("workers", "dataset", "on_error"), KINDS_OF_MIXED)
def test_a_sample_that_differs_ends_the_run_with_both_schemas_and_their_counts(
    workers: dict[str, Any], dataset: Any, on_error: str
) -> None:
    first = "{image: uint8 [2, 2], index: int64 []}"
    other = "{image: uint8 [2, 2, 3], index: int64 []}"
    with pytest.raises(SampleError) as raised:
        stream(dataset([*range(7), 10]), batches=4, on_error=on_error, **workers)
    text = str(raised.value)
    assert isinstance(raised.value, SchemaError)
    assert "sample 7 of Mixed" in text
    assert f"7 of {first}, 1 of {other}" in text
    assert "make all samples alike" in text
    assert "PadCollator" in text


@WITHOUT_SPAWN
@pytest.mark.parametrize("what", ["dtype", "layout", "fields", "no tensor", "no dict", "a list"])
def test_no_difference_of_a_sample_is_skipped(workers: dict[str, Any], what: str) -> None:
    with pytest.raises(SampleError, match=r"(?s)sample 9 of Mixed has another schema.*11 of {image: uint8"):
        stream(Mixed([9], what), batches=3, on_error="skip", **workers)


@WITHOUT_SPAWN
@pytest.mark.parametrize("what", ["no tensor", "no dict"])
def test_a_first_sample_that_is_no_sample_is_named_and_not_skipped(workers: dict[str, Any], what: str) -> None:
    with pytest.raises(DataPipelineError, match=r"sample 0 of Mixed: |'image': sample 0 of a batch is a str"):
        stream(Mixed([0], what), batches=1, on_error="skip", **workers)


@pytest.mark.parametrize("workers", [WORKERS[0], WORKERS[2]])
@DATASETS
def test_more_replaced_samples_than_the_budget_allows_end_the_run(workers: dict[str, Any], dataset: Any) -> None:
    bad = dataset(2000, bad=range(30, 1000, 60))
    sampler = CyclicSampler(bad, 50)
    with loading(bad, sampler, on_error="skip", **workers) as loader:
        iterator = iter(loader)
        found = [index for _ in range(19) for index in next(iterator).index.tensor.numpy().tolist()]
        # The smallest number of samples is what counts first: until then, 1 % may be any number.
        assert len(set(found) - bad.bad) >= 950 - 2 * 16
        reasons = r"skipped 17 of 1000 samples.*KeyError 17 times, such as sample 30: "
        with pytest.raises(SampleError, match=rf"{reasons}.*list bad samples in quarantine_file, or raise"):
            next(iterator)
    found = stream(bad, CyclicSampler(bad, 50), 20, on_error="skip", replacement_budget=0.017, **workers)
    assert len(found) == 20


def test_samples_that_the_quarantine_file_lists_do_not_count_as_replaced(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(f'{{"index": {index}}}\n' for index in range(0, 2000, 10)))
    dataset = Numbers(2000)
    assert len(stream(dataset, CyclicSampler(dataset, 50), 40, on_error="skip", quarantine_file=str(path))) == 40


@pytest.mark.parametrize("budget", [-0.1, 1.1, float("nan")])
def test_a_budget_is_a_share(budget: float) -> None:
    with pytest.raises(ConfigError, match=r"replacement_budget is .*it must be a number, 0 to 1"):
        ErrorPolicy("skip", replacement_budget=budget)
