"""The example models learn the same on every mesh, eager and as a graph."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

from tests.distributed.launcher import launch_ranks, ranks_of
from tests.distributed.scripts.train_models_on_meshes import STEPS
from tests.properties import slowly

SCRIPT = Path(__file__).parent / "scripts" / "train_models_on_meshes.py"
Trainings = tuple[tuple[str, ...], tuple[str, ...]]
"""Models and modes: each model is trained in each mode."""

ALL = ("vit", "gpt", "documents")
MODES = ("eager", "graph")
SHORT: tuple[dict[str, Trainings], ...] = (
    {"1x1x1": (("gpt",), ("eager",))},
    {"2x2x1": (("gpt",), ("eager",))},
    {"1x1x2": (("gpt",), ("eager",))},
)
# Two ranks cover what a GPT has on each axis alone; on four, two meshes of it show two axes together.
LONG: tuple[dict[str, Trainings], ...] = (
    {"1x1x1": (ALL, (*MODES, "checkpointing"))},
    dict.fromkeys(("2x1x1", "1x2x1", "1x1x2"), (ALL, MODES)),
    {
        **dict.fromkeys(("2x2x1", "2x1x2"), (("vit", "gpt"), MODES)),
        **dict.fromkeys(("4x1x1", "1x4x1"), (("vit",), MODES)),
    },
)
"""Launches of the short run, and of the long one: mesh -> what is trained on it."""

Case = tuple[str, str, str]


def cases_of(launch: dict[str, Trainings]) -> list[Case]:
    return [(mesh, model, mode) for mesh, trained in launch.items() for model, mode in product(*trained)]


SHORT_CASES = [case for launch in SHORT for case in cases_of(launch)]
CASES = [*SHORT_CASES, *(slowly(*case) for launch in LONG for case in cases_of(launch) if case not in SHORT_CASES)]
MESHES = ["1x1x1", "2x2x1", "1x1x2", *map(slowly, ("2x1x1", "1x2x1", "2x1x2", "4x1x1", "1x4x1"))]

Results = dict[str, Any]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Results]:
    """Results of a model on a mesh; each launch is made once, when it is first asked for."""
    found: Results = {}

    def results(mesh: str, what: str) -> Any:
        key = f"{mesh} {what}"
        if key not in found:
            wanted = (mesh, *what.split())
            launch = next(
                each for each in (*SHORT, *LONG) if wanted in cases_of(each) or (what == "collectives" and mesh in each)
            )
            file = tmp_path_factory.mktemp("models") / "results.json"
            cases = [f"{name}:{','.join(models)}:{','.join(modes)}" for name, (models, modes) in launch.items()]
            alone = any(mode != "eager" for *_, mode in cases_of(launch))
            result = launch_ranks(SCRIPT, ranks_of(mesh), str(file), *cases, timeout=400, alone=alone)
            assert result.returncode == 0, result.output
            found.update(json.loads(file.read_text()))
        return found[key]

    return results


@pytest.mark.parametrize(("mesh", "model", "mode"), CASES)
def test_all_losses_are_those_of_one_rank(mesh: str, model: str, mode: str, results_of: Callable[..., Results]) -> None:
    expected = results_of("1x1x1", f"{model} eager")["losses"]
    losses = results_of(mesh, f"{model} {mode}")["losses"]
    assert len(losses) >= STEPS
    np.testing.assert_allclose(losses, expected[: len(losses)], rtol=1e-4)


@pytest.mark.parametrize("model", ["gpt", *map(slowly, ("vit", "documents"))])
def test_thirty_steps_teach_the_model_something(model: str, results_of: Callable[..., Results]) -> None:
    losses = results_of("1x1x1", f"{model} eager")["losses"]
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])


@pytest.mark.parametrize(("mesh", "model", "mode"), CASES)
def test_initial_values_are_those_of_one_rank_bit_for_bit(
    mesh: str, model: str, mode: str, results_of: Callable[..., Results]
) -> None:
    expected = results_of("1x1x1", f"{model} eager")["parameters"]
    assert results_of(mesh, f"{model} {mode}")["parameters"] == expected


@pytest.mark.parametrize(("mesh", "model", "mode"), CASES)
def test_the_trained_model_predicts_what_that_of_one_rank_does(
    mesh: str, model: str, mode: str, results_of: Callable[..., Results]
) -> None:
    expected = results_of("1x1x1", f"{model} eager")
    result = results_of(mesh, f"{model} {mode}")
    assert result["evaluation"] == (["prediction_scores"] if model == "vit" else ["losses", "prediction_scores"])
    np.testing.assert_allclose(result["scores"], expected["scores"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mesh", MESHES)
def test_objects_and_tensors_travel_between_ranks(mesh: str, results_of: Callable[..., Results]) -> None:
    assert results_of(mesh, "collectives") == {
        "halves": [1.0, 1.0],
        "received": {"from": ranks_of(mesh) - 1},
        "global": [True, True],
        "whole": [1.0, 1.0],
        "local_tensor_untouched": True,
    }
