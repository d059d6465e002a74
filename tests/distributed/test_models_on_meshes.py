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
SHORT = (("1x1x1:gpt:eager",), ("2x2x1:gpt:eager",), ("1x1x2:gpt:eager",))
# Two ranks show each model and each mode on each axis alone; on four, two meshes show two axes together.
LONG = (
    ("1x1x1:vit,gpt,documents:eager,graph", "1x1x1:vit,gpt:checkpointing"),
    (
        *("2x1x1:gpt:eager,graph", "2x1x1:documents:eager", "2x1x1:vit:graph"),
        *("1x2x1:gpt:eager,graph", "1x2x1:documents:graph", "1x2x1:vit:eager"),
        *("1x1x2:gpt:eager,graph", "1x1x2:documents:eager", "1x1x2:vit:graph"),
    ),
    ("2x2x1:gpt:graph", "2x2x1:vit:eager", "2x1x2:gpt:eager", "2x1x2:vit:graph", "4x1x1:vit:eager", "1x4x1:vit:graph"),
)
"""Launches of the short run, and of the long one: what the ranks of each train, as MESH:MODELS:MODES."""

Launch = tuple[str, ...]
Case = tuple[str, str, str]


def cases_of(launch: Launch) -> list[Case]:
    return [
        (mesh, model, mode)
        for mesh, models, modes in (argument.split(":") for argument in launch)
        for model, mode in product(models.split(","), modes.split(","))
    ]


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
                each
                for each in (*SHORT, *LONG)
                if wanted in cases_of(each) or (what == "collectives" and mesh in {case[0] for case in cases_of(each)})
            )
            file = tmp_path_factory.mktemp("models") / "results.json"
            alone = any(mode != "eager" for *_, mode in cases_of(launch))
            result = launch_ranks(SCRIPT, ranks_of(mesh), str(file), *launch, timeout=400, alone=alone)
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
