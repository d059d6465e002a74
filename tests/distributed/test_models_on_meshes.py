"""The example models learn the same on every mesh, eager and as a graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

from tests.distributed.launcher import launch_ranks

SCRIPT = Path(__file__).parent / "scripts" / "train_models_on_meshes.py"
WORLDS = {
    "1x1x1": 1,
    "2x1x1": 2,
    "1x2x1": 2,
    "1x1x2": 2,
    "4x1x1": 4,
    "2x2x1": 4,
    "1x4x1": 4,
    "2x1x2": 4,
}
MESHES = list(WORLDS)
MODELS = {
    mesh: ["vit"] if mesh in ("4x1x1", "1x4x1", "2x1x2") else ["vit", "gpt"] + ["documents"] * (world < 4)
    for mesh, world in WORLDS.items()
}
CASES = [
    (mesh, model, mode)
    for mesh in MESHES
    for model in MODELS[mesh]
    for mode in (["eager", "graph", "checkpointing"] if mesh == "1x1x1" else ["eager", "graph"])
]

Results = dict[str, Any]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    """Results of all cases of a mesh's world: each world is launched once, when it is first asked for."""
    launched: dict[int, Results] = {}

    def results(mesh: str) -> Results:
        world_size = WORLDS[mesh]
        if world_size not in launched:
            file = tmp_path_factory.mktemp("models") / f"{world_size}.json"
            launch = launch_ranks(SCRIPT, world_size, str(file), timeout=400)
            assert launch.returncode == 0, launch.output
            launched[world_size] = json.loads(file.read_text())
        return launched[world_size]

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
        "received": {"from": WORLDS[mesh] - 1},
        "global": [True, True],
        "whole": [1.0, 1.0],
        "local_tensor_untouched": True,
    }
