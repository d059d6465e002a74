"""Who reads changes nothing of a training: eager, as a graph, with accumulation, by a model that changes its inputs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.launcher import launch_ranks

SCRIPT = Path(__file__).parent / "scripts" / "train_in_read_modes.py"
WAYS = ["eager", "eager, accumulated", "eager, writing into its inputs", "graph", "graph, accumulated"]

Losses = dict[str, dict[str, list[float]]]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    folder = tmp_path_factory.mktemp("modes")
    launch = launch_ranks(SCRIPT, 4, str(folder), timeout=100)
    assert launch.returncode == 0, launch.output
    found: Losses = json.loads((folder / "losses.json").read_text())
    assert list(found) == WAYS
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("readers", ["node", "rank0"])
def test_losses_are_those_of_ranks_that_read_for_themselves(way: str, readers: str, losses: Losses) -> None:
    assert len(set(losses[way]["data_parallel"])) == 4
    assert losses[way][readers] == losses[way]["data_parallel"]


@pytest.mark.parametrize("way", WAYS[1:])
def test_graphs_and_accumulation_train_as_eager_steps_do(way: str, losses: Losses) -> None:
    if "writing" in way:
        assert not np.allclose(losses[way]["node"], losses["eager"]["node"], rtol=1e-4)
    else:
        np.testing.assert_allclose(losses[way]["node"], losses["eager"]["node"], rtol=1e-4)
