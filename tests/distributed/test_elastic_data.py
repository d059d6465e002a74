"""A training that goes from mesh to mesh takes, in each step, the samples that one rank takes, and logs the same."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from libai_data.data.samplers import Order, StepSchedule
from tests.data.samplers.step_runs import expected_steps
from tests.distributed.launcher import found_by_ranks
from tests.distributed.scripts.elastic_data import LEGS, LENGTH, RAMP, SKIPS, schedule_keys
from tests.engine.data_runs import config_of, metric, train

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts" / "elastic_data.py"
STEPS = 2 * len(LEGS)


class Runs(NamedTuple):
    """A training on seven meshes one after the other, and one on one rank."""

    folder: Path
    taken: list[dict[str, list[list[int]]]]
    one_rank: Path
    one_rank_steps: dict[int, list[int]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("elastic")
    taken = found_by_ranks(SCRIPT, 4, folder, timeout=150)
    one_rank = train(config_of(folder / "one_rank", LENGTH, **schedule_keys(), train_micro_batch_size=None))
    return Runs(folder / "run", taken, folder / "one_rank", one_rank.steps)


def test_every_step_takes_the_samples_of_the_definition_on_every_mesh(runs: Runs) -> None:
    schedule = StepSchedule(tuple((step, size) for step, size in RAMP))
    skips = tuple((first, last) for first, last in SKIPS)
    expected = [[index for _, index in step] for step in expected_steps(Order(LENGTH, 1234), schedule, skips, STEPS)]
    assert [runs.one_rank_steps[step] for step in range(STEPS)] == expected
    for step in range(STEPS):
        data, tensor = LEGS[step // 2].mesh
        batches = [taken[str(step)] for taken in runs.taken]
        for rank in range(4):
            assert batches[rank] == batches[rank // tensor * tensor], "tensor peers see the same samples"
        shards = batches[::tensor]
        assert len(shards) == data
        assert [index for parts in zip(*shards) for part in parts for index in part] == expected[step]


def test_the_losses_are_those_of_one_rank(runs: Runs) -> None:
    here, there = (metric(folder, "total_loss") for folder in (runs.folder, runs.one_rank))
    np.testing.assert_allclose([here[step] for step in range(STEPS)], [there[step] for step in range(STEPS)], rtol=1e-4)


@pytest.mark.parametrize("name", ["epoch", "position", "consumed_samples", "lr"])
def test_progress_and_learning_rate_are_logged_alike_on_every_mesh(runs: Runs, name: str) -> None:
    assert sorted(metric(runs.folder, name)) == list(range(STEPS))
    assert metric(runs.folder, name) == metric(runs.one_rank, name)
