"""The trainer's evaluation on any mesh, with the user's own collators too, is that of one rank, or a clear error."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libai_data.data.samplers import Order
from tests.distributed.launcher import found_by_ranks, ranks_of
from tests.distributed.scripts.evaluate_in_trainer import (
    CASES,
    LENGTHS,
    LIMITED,
    MICRO_BATCH,
    SAMPLES,
    Sentences,
    found_on,
)
from tests.properties import slowly

SCRIPT = Path(__file__).parent / "scripts" / "evaluate_in_trainer.py"
SHORT, LONG = "2x2x1", ("1x4x1", "1x1x4", "2x1x2", "1x2x2", "4x1x1")
EVALUATIONS = [
    *(("few", "2x1x2", name, readers) for name, readers in CASES["few"]),
    *(("some", SHORT, name, readers) for name, readers in CASES["some"]),
    *(slowly("all", SHORT, name, readers) for name, readers in CASES["all"] if (name, readers) not in CASES["some"]),
    *(slowly("some", mesh, name, readers) for mesh in LONG for name, readers in CASES["some"]),
]
"""Which cases a launch has, mesh, case and read mode."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda which: found_on(tmp_path_factory.mktemp("alone"), "1x1x1", CASES[which]))


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def found(which: str, mesh: str) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("evaluated")
        ranks = found_by_ranks(SCRIPT, ranks_of(mesh), folder, which, mesh, timeout=150)
        return [{**each[mesh], "refused": each["refused"]} for each in ranks]

    return found


def is_refused(name: str, readers: str, data: int) -> str:
    """Why data-parallel ranks cannot have this evaluation; "" if they can."""
    if data > 1 and readers != "data_parallel" and ("mask" in name or "table" in name or "square" in name):
        return "field 'shared' has shape .* needs one row for each of its"
    if data > 1 and readers == "data_parallel" and name == "padded to the longest":
        return "field 'tail' "
    return ""


@pytest.mark.parametrize(("which", "mesh", "name", "readers"), EVALUATIONS)
def test_an_evaluation_of_collated_batches_is_that_of_one_rank_or_refused_on_every_rank(
    which: str, mesh: str, name: str, readers: str, on_ranks: Any, alone: Any
) -> None:
    ranks, case = on_ranks(which, mesh), f"{name}, {readers}"
    found, reference = ranks[0][case], alone("all" if which == "all" else "some")
    expected = reference[case]
    problem = is_refused(name, readers, int(mesh[0]))
    if problem:
        for rank in ranks:
            assert re.search(problem, str(rank[case])), rank[case]
        return
    assert isinstance(found, dict), found
    samples = LENGTHS.get(name, SAMPLES)
    counted = min(samples, MICRO_BATCH) if name == LIMITED else samples
    assert found["metrics"]["samples"] == counted
    assert [each[case]["metrics"] for each in ranks] == [found["metrics"]] * len(ranks)
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)
    by_tokens = {tuple(tokens): (scores, tail) for tokens, scores, tail in expected["samples"]}
    tokens_in_order = Sentences(samples).tokens[Order(samples, 1234).locate(np.arange(counted))[1]].tolist()
    assert sorted(tokens for tokens, *_ in found["samples"]) == sorted(tokens_in_order)
    for tokens, scores, tail in found["samples"]:
        np.testing.assert_allclose(scores, by_tokens[tuple(tokens)][0], rtol=1e-4, atol=1e-5)
        assert tail == by_tokens[tuple(tokens)][1]
    for table, doubled in found["tables"]:
        assert np.array_equal(2 * np.array(table), doubled)
        assert np.array_equal(table[: len(expected["tables"][0][0])], expected["tables"][0][0])


def test_loaders_of_unequal_lengths_and_local_outputs_are_refused_on_all_ranks(on_ranks: Any) -> None:
    for rank in on_ranks("some", SHORT):
        unequal, local = rank["refused"]
        assert "the test loaders of ranks [0, 2, 3] have ended after 1 batches, those of ranks [1] have not" in unequal
        assert "is a local tensor, so the parts of the other ranks would be" in local
