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
LAUNCHES = ((1, ["1x1x1"]), (4, ["2x2x1", "2x1x2"]), (2, ["2x1x1", "1x2x1", "1x1x2"]), (4, ["4x1x1", "1x4x1"]))
"""Ranks, and the meshes that they train on; the last two are for the long run."""

MESHES = [mesh if launch in LAUNCHES[:2] else slowly(mesh) for launch in LAUNCHES for mesh in launch[1]]


def models_of(ranks: int, mesh: str) -> list[str]:
    if ranks == 4:
        return ["vit", "gpt"] if mesh == "2x2x1" else ["vit"]
    return ["vit", "gpt", "documents"]


CASES = [
    (mesh, model, mode) if launch in LAUNCHES[:2] else slowly(mesh, model, mode)
    for launch in LAUNCHES
    for mesh in launch[1]
    for model in models_of(launch[0], mesh)
    for mode in (["eager", "graph", "checkpointing"] if mesh == "1x1x1" else ["eager", "graph"])
]

Results = dict[str, Any]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    """Results of all cases of a mesh; each launch is made once, when one of its meshes is first asked for."""
    found: Results = {}

    def results(mesh: str) -> Results:
        if f"{mesh} collectives" not in found:
            ((ranks, meshes),) = [launch for launch in LAUNCHES if mesh in launch[1]]
            file = tmp_path_factory.mktemp("models") / "results.json"
            launch = launch_ranks(SCRIPT, ranks, str(file), *meshes, timeout=400)
            assert launch.returncode == 0, launch.output
            found.update(json.loads(file.read_text()))
        return found

    return results


@pytest.mark.parametrize(("mesh", "model", "mode"), CASES)
def test_thirty_losses_are_those_of_one_rank(
    mesh: str, model: str, mode: str, results_of: Callable[[str], Results]
) -> None:
    expected = results_of("1x1x1")[f"1x1x1 {model} eager"]["losses"]
    losses = results_of(mesh)[f"{mesh} {model} {mode}"]["losses"]
    assert len(losses) == 30
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


@pytest.mark.parametrize("model", ["vit", "gpt", "documents"])
def test_thirty_steps_teach_the_model_something(model: str, results_of: Callable[[str], Results]) -> None:
    losses = results_of("1x1x1")[f"1x1x1 {model} eager"]["losses"]
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])


@pytest.mark.parametrize(("mesh", "model", "mode"), CASES)
def test_initial_values_are_those_of_one_rank_bit_for_bit(
    mesh: str, model: str, mode: str, results_of: Callable[[str], Results]
) -> None:
    expected = results_of("1x1x1")[f"1x1x1 {model} eager"]["parameters"]
    assert results_of(mesh)[f"{mesh} {model} {mode}"]["parameters"] == expected


@pytest.mark.parametrize(("mesh", "model", "mode"), CASES)
def test_the_trained_model_predicts_what_that_of_one_rank_does(
    mesh: str, model: str, mode: str, results_of: Callable[[str], Results]
) -> None:
    expected = results_of("1x1x1")[f"1x1x1 {model} eager"]
    result = results_of(mesh)[f"{mesh} {model} {mode}"]
    assert result["evaluation"] == (["prediction_scores"] if model == "vit" else ["losses", "prediction_scores"])
    np.testing.assert_allclose(result["scores"], expected["scores"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mesh", MESHES)
def test_objects_and_tensors_travel_between_ranks(mesh: str, results_of: Callable[[str], Results]) -> None:
    assert results_of(mesh)[f"{mesh} collectives"] == {
        "received": {"from": prod(map(int, mesh.split("x"))) - 1},
        "global": [True, True],
        "whole": [1.0, 1.0],
        "local_tensor_untouched": True,
    }
