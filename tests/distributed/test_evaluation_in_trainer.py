"""The trainer's evaluation of a ragged tail, with the user's own collators, is that of one rank, or a clear error."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.launcher import found_by_ranks, ranks_of
from tests.distributed.scripts.evaluate_in_trainer import CASES, SAMPLES, Sentences, found_on
from tests.properties import slowly

SCRIPT = Path(__file__).parent / "scripts" / "evaluate_in_trainer.py"
SHORT, LONG = "2x2x1", ("1x4x1", "1x1x4", "2x1x2", "1x2x2", "4x1x1")
EVALUATIONS = [
    *(("some", SHORT, name, readers) for name, readers in CASES["some"]),
    *(slowly("all", SHORT, name, readers) for name, readers in CASES["all"] if (name, readers) not in CASES["some"]),
    *(slowly("some", mesh, name, readers) for mesh in LONG for name, readers in CASES["some"]),
]
"""Which cases a launch has, mesh, collator and read mode."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda which: found_on(tmp_path_factory.mktemp("alone"), "1x1x1", CASES[which]))


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def found(which: str, mesh: str) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("evaluated")
        ranks = found_by_ranks(SCRIPT, ranks_of(mesh), folder, which, mesh, timeout=150)
        return [each[mesh] for each in ranks]

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
    found, expected = ranks[0][case], alone(which)[case]
    problem = is_refused(name, readers, int(mesh[0]))
    if problem:
        for rank in ranks:
            assert re.search(problem, str(rank[case])), rank[case]
        return
    assert isinstance(found, dict), found
    assert found["metrics"]["samples"] == expected["metrics"]["samples"] == SAMPLES
    assert [each[case]["metrics"] for each in ranks] == [found["metrics"]] * len(ranks)
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)
    by_tokens = {tuple(tokens): (scores, tail) for tokens, scores, tail in expected["samples"]}
    assert sorted(tuple(tokens) for tokens, *_ in found["samples"]) == sorted(map(tuple, Sentences().tokens.tolist()))
    for tokens, scores, tail in found["samples"]:
        np.testing.assert_allclose(scores, by_tokens[tuple(tokens)][0], rtol=1e-4, atol=1e-5)
        assert tail == by_tokens[tuple(tokens)][1]
    for table, doubled in found["tables"]:
        assert np.array_equal(2 * np.array(table), doubled)
        assert np.array_equal(table[: len(expected["tables"][0][0])], expected["tables"][0][0])
