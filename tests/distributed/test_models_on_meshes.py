"""The example models learn the same on every mesh, eager and as a graph."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

from tests.distributed.launcher import launch_ranks
from tests.properties import slowly

SCRIPT = Path(__file__).parent / "scripts" / "train_models_on_meshes.py"
ALL = ("vit", "gpt", "documents")
# Two ranks cover what a GPT has on each axis alone; on four, one mesh of it shows both axes together.
LAUNCHES: tuple[dict[str, tuple[str, ...]], ...] = (
    {"1x1x1": ALL},
    {"2x2x1": ("gpt",), "2x1x2": ("vit",)},
    {"2x1x1": ALL, "1x2x1": ALL, "1x1x2": ALL},
    {"2x2x1": ("vit",), "4x1x1": ("vit",), "1x4x1": ("vit",)},
)
"""Mesh -> the models that are trained on it; the last two are for the long run."""

MESHES = [mesh if launch in LAUNCHES[:2] else slowly(mesh) for launch in LAUNCHES[:3] for mesh in launch]
MESHES += [slowly(mesh) for mesh in ("4x1x1", "1x4x1")]
CASES = [
    (mesh, model, mode) if launch in LAUNCHES[:2] else slowly(mesh, model, mode)
    for launch in LAUNCHES
    for mesh, models in launch.items()
    for model in models
    for mode in (["eager", "graph", "checkpointing"] if mesh == "1x1x1" else ["eager", "graph"])
]

Results = dict[str, Any]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Results]:
    """Results of a model on a mesh; each launch is made once, when it is first asked for."""
    found: Results = {}

    def results(mesh: str, model: str | None = None) -> Results:
        if f"{mesh} {model} eager" not in found and (model or f"{mesh} collectives" not in found):
            launch = next(each for each in LAUNCHES if model in (None, *each.get(mesh, ())) and mesh in each)
            file = tmp_path_factory.mktemp("models") / "results.json"
            cases = [f"{name}:{','.join(models)}" for name, models in launch.items()]
            result = launch_ranks(SCRIPT, prod(map(int, mesh.split("x"))), str(file), *cases, timeout=400)
            assert result.returncode == 0, result.output
            found.update(json.loads(file.read_text()))
        return found

    return results


@pytest.mark.parametrize(("mesh", "model", "mode"), CASES)
def test_thirty_losses_are_those_of_one_rank(
    mesh: str, model: str, mode: str, results_of: Callable[..., Results]
) -> None:
    expected = results_of("1x1x1", model)[f"1x1x1 {model} eager"]["losses"]
    losses = results_of(mesh, model)[f"{mesh} {model} {mode}"]["losses"]
    assert len(losses) == 30
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


@pytest.mark.parametrize("model", ["vit", "gpt", "documents"])
def test_thirty_steps_teach_the_model_something(model: str, results_of: Callable[..., Results]) -> None:
    losses = results_of("1x1x1", model)[f"1x1x1 {model} eager"]["losses"]
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])


@pytest.mark.parametrize(("mesh", "model", "mode"), CASES)
def test_initial_values_are_those_of_one_rank_bit_for_bit(
    mesh: str, model: str, mode: str, results_of: Callable[..., Results]
) -> None:
    expected = results_of("1x1x1", model)[f"1x1x1 {model} eager"]["parameters"]
    assert results_of(mesh, model)[f"{mesh} {model} {mode}"]["parameters"] == expected


@pytest.mark.parametrize(("mesh", "model", "mode"), CASES)
def test_the_trained_model_predicts_what_that_of_one_rank_does(
    mesh: str, model: str, mode: str, results_of: Callable[..., Results]
) -> None:
    expected = results_of("1x1x1", model)[f"1x1x1 {model} eager"]
    result = results_of(mesh, model)[f"{mesh} {model} {mode}"]
    assert result["evaluation"] == (["prediction_scores"] if model == "vit" else ["losses", "prediction_scores"])
    np.testing.assert_allclose(result["scores"], expected["scores"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mesh", MESHES)
def test_objects_and_tensors_travel_between_ranks(mesh: str, results_of: Callable[..., Results]) -> None:
    assert results_of(mesh)[f"{mesh} collectives"] == {
        "received": {"from": prod(map(int, mesh.split("x"))) - 1},
        "global": [True, True],
        "whole": [1.0, 1.0],
        "local_tensor_untouched": True,
    }
