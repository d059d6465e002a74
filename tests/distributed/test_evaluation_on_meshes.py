"""Evaluation on any mesh counts each sample once, and gives the metrics of one rank."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Callable, NamedTuple

import numpy as np
import pytest

from libai_data.data.samplers import Order
from libai_data.engine.evaluation.metrics import correct_in_top_k
from tests.distributed.launcher import launch_ranks, once_for_each, ranks_of
from tests.distributed.scripts.evaluation_cases import CASES, LENGTH, MICRO_BATCH, Case, Sentences
from tests.properties import slowly

SCRIPT = Path(__file__).parent / "scripts" / "evaluate_on_meshes.py"


class Launched(NamedTuple):
    """What the ranks of a launch found and said."""

    found: Any
    output: str


Launch = Callable[[str], Launched]

LAUNCHES = (
    ("1x1x1",),
    ("2x1x2", "refusals"),
    ("2x1x1", "1x2x1", "refusals"),
    ("2x2x1", "4x1x1", "1x4x1"),
)
"""Meshes, and what else the ranks try; the last two are for the long run."""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    def launch(names: tuple[str, ...]) -> Launched:
        folder = tmp_path_factory.mktemp("evaluated")
        result = launch_ranks(SCRIPT, ranks_of(names[0]), str(folder), *names, timeout=150)
        assert result.returncode == 0, result.output
        return Launched(json.loads((folder / "found.json").read_text()), result.output)

    return once_for_each(LAUNCHES, launch)


everywhere = pytest.mark.parametrize(
    "mesh",
    [mesh if names in LAUNCHES[:2] else slowly(mesh) for names in LAUNCHES for mesh in names if mesh[0].isdigit()],
)


def samples_of(case: Case, mesh: str) -> int:
    if case.eval_iter > case.samples:
        return case.samples
    return min(case.samples, int(case.eval_iter) * MICRO_BATCH * int(mesh.split("x")[0]))


@everywhere
def test_each_sample_counts_once_with_its_own_scores(mesh: str, launched: Launch) -> None:
    for case in CASES:
        found = launched(mesh).found[mesh][case.name]
        expected = samples_of(case, mesh)
        indices = Order(case.samples, 0).locate(np.arange(expected))[1]
        sentences = Sentences(case.samples).tokens[indices, :LENGTH]
        assert Counter(tuple(tokens) for tokens, _ in found["seen"]) == Counter(map(tuple, sentences.tolist())), case
        assert found["metrics"]["samples"] == expected
        alone = launched("1x1x1").found["1x1x1"][Case(case.samples).name]["seen"]
        by_tokens = {tuple(tokens): scores for tokens, scores in alone}
        for tokens, scores in found["seen"]:
            np.testing.assert_allclose(scores, by_tokens[tuple(tokens)], rtol=1e-4, atol=1e-5)


@everywhere
def test_metrics_are_those_of_one_rank_to_a_millionth(mesh: str, launched: Launch) -> None:
    alone = launched("1x1x1").found["1x1x1"]
    for case in CASES:
        found = launched(mesh).found[mesh][case.name]["metrics"]
        if case.eval_iter > case.samples:
            assert found == pytest.approx(alone[Case(case.samples).name]["metrics"], rel=1e-6), case


@everywhere
def test_metrics_are_what_numpy_makes_of_the_scores(mesh: str, launched: Launch) -> None:
    for case in CASES:
        found = launched(mesh).found[mesh][case.name]
        sentences = Sentences(case.samples)
        place = {tuple(tokens): number for number, tokens in enumerate(sentences.tokens[:, :LENGTH].tolist())}
        scores = np.array([scores for _, scores in found["seen"]], np.float32)
        kinds = sentences.kinds[[place[tuple(tokens)] for tokens, _ in found["seen"]]]
        for k in (1, 3):
            expected = 100 * correct_in_top_k(scores, kinds, k) / len(kinds)
            assert found["metrics"][f"Acc@{k}"] == pytest.approx(expected, rel=1e-6)
        assert found["metrics"]["perplexity"] == pytest.approx(np.exp(found["metrics"]["loss"]), rel=1e-9)


@pytest.mark.parametrize(("world_size", "mesh"), [slowly(2, "2x1x1"), (4, "2x1x2")])
def test_loaders_of_unequal_lengths_are_refused_on_all_ranks(world_size: int, mesh: str, launched: Launch) -> None:
    others = [rank for rank in range(world_size) if rank != 1]
    said = f"the test loaders of ranks {others} have ended after 1 batches, those of ranks [1] have not"
    assert launched(mesh).output.count(said) == world_size


@pytest.mark.parametrize(("world_size", "mesh"), [slowly(2, "2x1x1"), (4, "2x1x2")])
def test_local_tensors_whose_other_parts_would_be_lost_are_refused(
    world_size: int, mesh: str, launched: Launch
) -> None:
    assert launched(mesh).output.count("is a local tensor, so the parts of the other ranks would be") == world_size
