"""Who reads changes nothing of a training: eager, as a graph, with accumulation, by a model that changes its inputs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.launcher import launch_ranks

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts" / "train_in_read_modes.py"
WAYS = ("eager", "eager, writing into its inputs", "graph, accumulated", "eager, accumulated", "graph")

Losses = dict[str, list[float]]


@pytest.fixture(scope="module")
def losses_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Losses]:
    """Way -> read mode -> losses."""
    folder = tmp_path_factory.mktemp("modes")
    launch = launch_ranks(SCRIPT, 4, str(folder), *WAYS, timeout=200, alone=True)
    assert launch.returncode == 0, launch.output
    found: dict[str, Losses] = json.loads((folder / "losses.json").read_text())
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("readers", ["node", "rank0"])
def test_losses_are_those_of_ranks_that_read_for_themselves(
    way: str, readers: str, losses_of: dict[str, Losses]
) -> None:
    assert len(set(losses_of[way]["every_rank"])) == 4
    assert losses_of[way][readers] == losses_of[way]["every_rank"]


@pytest.mark.parametrize("way", WAYS[1:])
def test_graphs_and_accumulation_train_as_eager_steps_do(way: str, losses_of: dict[str, Losses]) -> None:
    expected = losses_of["eager"]["node"]
    if "writing" in way:
        assert not np.allclose(losses_of[way]["node"], expected, rtol=1e-4)
    else:
        np.testing.assert_allclose(losses_of[way]["node"], expected, rtol=1e-4)
