from __future__ import annotations

import re
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai_data import DataLoader
from libai_data.data.samplers import CyclicSampler, SingleRoundSampler
from libai_data.errors import ConfigError, ContractError
from libai_data.testing import CHECKS, Report, check_conformance
from libai_data.testing.conformance import _different
from tests.properties import examples, slowly
from tests.testing import faulty_loaders as faulty

SAMPLES = 43
BATCH = 8


def check_faulty(kind: type[faulty.Exact], **options: Any) -> Report:
    return check_conformance(lambda rank, world, state: kind(rank, world, state, SAMPLES), SAMPLES, **options)


def test_a_loader_that_keeps_every_promise_passes() -> None:
    report = check_faulty(faulty.Exact)
    assert report.passed, str(report)
    verdicts = {finding.check: finding.verdict for finding in report.findings}
    assert verdicts.pop("workers") == "not checked"
    assert set(verdicts.values()) == {"kept"}
    report.raise_if_broken()


@pytest.mark.parametrize(
    ("kind", "broken", "detail"),
    [
        (faulty.DividesGlobalByPerRank, "state", "world 2 to 2, cut after step 0: step 1, rank 0 has"),
        (faulty.RaggedTail, "steps", "world 4, epoch 0: the ranks take [6, 6, 6, 5] steps"),
        (faulty.CountsPadding, "once", "comes a 2nd time in step 5, in epoch 0"),
        (faulty.DependsOnTheWorld, "world", "world 2 against 1: the first 8 samples have"),
        (faulty.CountsPrefetched, "state", "cut after step 0: step 1, rank 0 has"),
        (faulty.DropsTheTail, "once", "world 1, epoch 0: 3 of 43 indices are missing: ["),
        (faulty.ShortEpochAfterResume, "epochs", "the epoch after it:"),
    ],
)
def test_a_planted_fault_is_found_and_shown(kind: type[faulty.Exact], broken: str, detail: str) -> None:
    report = check_faulty(kind)
    assert broken in report.broken
    assert detail in next(finding.detail for finding in report.findings if finding.check == broken), str(report)
    with pytest.raises(ContractError, match="BROKEN"):
        report.raise_if_broken()


def test_an_order_that_depends_on_the_workers_is_found() -> None:
    def make_loader(rank: int, world: int, state: Any, workers: int) -> Any:
        return faulty.WorkerCountChangesOrder(rank, world, state, SAMPLES, workers)

    assert check_conformance(make_loader, SAMPLES, workers=(1, 2)).broken == ["workers"]


MODES: list[dict[str, Any]] = [
    {"endless": endless, "shuffle": shuffle, "worker_type": kind}
    for endless in (True, False)
    for shuffle in (True, False)
    for kind in ("process", "thread")
]


def check_ours(samples: int, batch: int, mode: dict[str, Any], **options: Any) -> Report:
    def make_loader(rank: int, world: int, state: Any, workers: int = 0) -> DataLoader:
        dataset = [{"number": index} for index in range(samples)]
        sampler = (CyclicSampler if mode["endless"] else SingleRoundSampler)(
            dataset,
            batch // world,
            shuffle=mode["shuffle"],
            data_parallel_rank=rank,
            data_parallel_size=world,
            seed=3,
        )
        loader = DataLoader(dataset, sampler, num_workers=workers, worker_type=mode.get("worker_type", "process"))
        if state is not None:
            loader.load_state_dict(state)
        return loader

    return check_conformance(make_loader, samples, endless=mode["endless"], **options)


@pytest.mark.parametrize(
    "mode",
    [slowly(mode) if mode["worker_type"] == "process" else mode for mode in MODES],
    ids=lambda mode: "-".join(f"{key}={value}" for key, value in mode.items()),
)
def test_ours_passes_in_every_mode(mode: dict[str, Any]) -> None:
    report = check_ours(SAMPLES, BATCH, mode)
    assert report.passed, str(report)
    assert all(finding.cases for finding in report.findings), str(report)


@given(st.integers(1, 20), st.integers(1, 3), st.booleans(), st.booleans())
@settings(max_examples=examples(15))
def test_ours_passes_whatever_the_sizes(samples: int, per_rank: int, endless: bool, shuffle: bool) -> None:
    batch = per_rank * 2
    if endless and samples < batch:
        samples += batch
    report = check_ours(samples, batch, {"endless": endless, "shuffle": shuffle}, worlds=(1, 2), workers=(0,))
    assert report.passed, str(report)


def test_the_table_has_a_line_for_each_promise() -> None:
    report = check_faulty(faulty.DropsTheTail, title="A sampler that drops the tail")
    text, markdown = str(report), report.markdown()
    assert text.startswith("A sampler that drops the tail\n")
    for promise in CHECKS.values():
        assert text.count(promise) == markdown.count(promise) == 1
    assert re.search("every index once an epoch +BROKEN +6 of 6 +world 1, epoch 0: 3 of 43", text)
    assert "| every index once an epoch | BROKEN | 6 of 6 | world 1, epoch 0: 3 of 43" in markdown


def test_what_cannot_be_checked_is_said() -> None:
    report = check_conformance(lambda rank, world, state: [[0, 1], [2]], 3, worlds=(1,))
    assert report.passed
    details = {finding.check: finding.detail for finding in report.findings if not finding.cases}
    assert sorted(details) == ["elastic", "epochs", "state", "workers", "world"]
    assert details["state"] == "the loader has no state_dict"
    assert details["world"] == "only one world size was given"


def test_batches_of_any_kind_are_read_and_padding_is_told_by_negative_numbers() -> None:
    def make_loader(rank: int, world: int, state: Any) -> list[dict[str, Any]]:
        return [{"ids": np.array([0, 1])}, {"ids": np.array([2, -1])}]

    assert check_conformance(make_loader, 3, worlds=(1,), indices_of=lambda batch: batch["ids"]).passed
    with pytest.raises(ConfigError, match="indices_of"):
        check_conformance(make_loader, 3, worlds=(1,))


def test_a_loader_that_never_ends_is_not_waited_for() -> None:
    def make_loader(rank: int, world: int, state: Any) -> Iterator[list[int]]:
        while True:
            yield [0]

    with pytest.raises(ConfigError, match="endless=True"):
        check_conformance(make_loader, 3, worlds=(1,))


def test_an_index_of_another_dataset_is_found() -> None:
    report = check_conformance(lambda rank, world, state: [[0, 3], [1, 2]], 3, worlds=(1,))
    assert "step 0 has index 3; the dataset has 3 samples" in str(report)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_loader_that_yields_less_with_workers_is_found(steps: int) -> None:
    class Ending(faulty.Exact):
        def __init__(self, rank: int, world: int, state: Any, workers: int) -> None:
            super().__init__(rank, world, state, SAMPLES)
            self.most = steps if workers or not steps else 99

        def batches(self) -> Any:
            return super().batches()[: self.most]

    report = check_conformance(lambda rank, world, state, workers: Ending(rank, world, state, workers), SAMPLES)
    assert ("workers" if steps else "once") in report.broken


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"samples": "3"}, "samples is '3'; it must be an int, 1 to"),
        ({"samples": 10**12}, "samples is 1000000000000; it must be an int, 1 to"),  # its count would fill the memory
        ({"worlds": 2}, "worlds is 2; it must be a list"),
        ({"worlds": ()}, "worlds is empty"),
        ({"workers": [-1]}, r"workers is \[-1\]; it must be a list"),
        ({"make_loader": [[0, 1, 2]]}, "make_loader is .*; it must be a function"),
    ],
)
def test_arguments_that_cannot_be_are_named(wrong: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"make_loader": lambda rank, world, state: [[0, 1, 2]], "samples": 3, **wrong}
    with pytest.raises(ConfigError, match=message):
        check_conformance(**arguments)


def test_streams_are_compared_in_memory_that_does_not_grow_with_their_steps() -> None:
    size = 2000
    steps = [[[index]] for index in range(size)]
    tracemalloc.start()
    try:
        assert not _different(steps, [[[index, index + 1]] for index in range(0, size, 2)])
        assert "the first 2000 samples have [7] instead of [1999]" in _different(steps, [*steps[:-1], [[7]]])
        assert tracemalloc.get_traced_memory()[1] < 10e6  # bytes; a count after each step would need 100 MB
    finally:
        tracemalloc.stop()
