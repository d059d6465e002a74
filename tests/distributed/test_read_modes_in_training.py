"""Who reads changes nothing of a training: eager, as a graph, with accumulation, by a model that changes its inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Callable

import numpy as np
import pytest

from tests.distributed.launcher import launch_ranks
from tests.properties import slowly

SCRIPT = Path(__file__).parent / "scripts" / "train_in_read_modes.py"
SHORT = ("eager", "eager, writing into its inputs", "graph, accumulated")
LONG = ("eager, accumulated", "graph")
"""Ways of training in the short run, and those that the long run adds."""

Losses = dict[str, list[float]]
LossesOf = Callable[[str], Losses]


@pytest.fixture(scope="module")
def losses_of(tmp_path_factory: pytest.TempPathFactory) -> LossesOf:
    """Read mode -> losses of a way; each launch is made once, when one of its ways is first asked for."""
    found: dict[str, Losses] = {}

    def losses(way: str) -> Losses:
        if way not in found:
            folder = tmp_path_factory.mktemp("modes")
            launch = launch_ranks(SCRIPT, 4, str(folder), *(SHORT if way in SHORT else LONG), timeout=100)
            assert launch.returncode == 0, launch.output
            found.update(json.loads((folder / "losses.json").read_text()))
        return found[way]

    return losses


@pytest.mark.parametrize("way", [*SHORT, *map(slowly, LONG)])
@pytest.mark.parametrize("readers", ["node", "rank0"])
def test_losses_are_those_of_ranks_that_read_for_themselves(way: str, readers: str, losses_of: LossesOf) -> None:
    assert len(set(losses_of(way)["every_rank"])) == 4
    assert losses_of(way)[readers] == losses_of(way)["every_rank"]


@pytest.mark.parametrize("way", [*SHORT[1:], *map(slowly, LONG)])
def test_graphs_and_accumulation_train_as_eager_steps_do(way: str, losses_of: LossesOf) -> None:
    expected = losses_of("eager")["node"]
    if "writing" in way:
        assert not np.allclose(losses_of(way)["node"], expected, rtol=1e-4)
    else:
        np.testing.assert_allclose(losses_of(way)["node"], expected, rtol=1e-4)
