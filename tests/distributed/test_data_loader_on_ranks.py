"""A `DataLoader` of PyTorch's arguments on four ranks: the epochs of one rank, on every mesh and in each read mode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from libai_data import DataLoader
from libai_data.data.datasets import FilteredDataset
from tests.distributed.launcher import launch_ranks

SCRIPT = Path(__file__).parent / "scripts" / "data_loader_on_ranks.py"
SAMPLES = 22
MESHES = ("4x1", "2x2", "1x4")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Case and mesh -> the batches of two epochs."""
    file = tmp_path_factory.mktemp("loaders") / "results.json"
    result = launch_ranks(SCRIPT, 4, str(file), timeout=150)
    assert result.returncode == 0, result.output
    results: dict[str, Any] = json.loads(file.read_text())
    return results


def rows(epoch: list[Any]) -> list[int]:
    return [row for batch, valid, _ in epoch for row in batch[:valid]]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", ["shuffled", "by node", "by rank 0"])
def test_shuffled_epochs_are_those_of_one_rank(found: dict[str, Any], case: str, mesh: str) -> None:
    alone = DataLoader([{"x": number} for number in range(SAMPLES)], global_batch_size=8, shuffle=True, seed=3)
    for epoch in found[f"{case} {mesh}"]:
        assert rows(epoch) == [row for batch in alone for row in batch["x"].numpy().tolist()]
        assert [valid for _, valid, _ in epoch] == [8, 8, 6]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", ["weighted", "weighted by node"])
def test_weighted_draws_are_those_of_one_rank_though_several_ranks_get_the_same_sample(
    found: dict[str, Any], case: str, mesh: str
) -> None:
    alone = DataLoader(
        [{"x": number} for number in range(SAMPLES)], global_batch_size=8, weights=[1] * 20 + [20, 0], seed=3
    )
    for epoch in found[f"{case} {mesh}"]:
        assert rows(epoch) == [row for batch in alone for row in batch["x"].numpy().tolist()]
        assert rows(epoch).count(20) > 4


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", ["lanes", "lanes by node", "lanes by rank 0"])
def test_epochs_in_lanes_are_those_of_one_rank(found: dict[str, Any], case: str, mesh: str) -> None:
    class Shards(list[Any]):
        shard_lengths = (3, 5, 4, 6, 4)

    alone = DataLoader(
        Shards({"x": number} for number in range(SAMPLES)), global_batch_size=8, shuffle=True, seed=3, lanes=4, block=2
    )
    for number, epoch in enumerate(found[f"{case} {mesh}"]):
        assert rows(epoch) == [row for batch in alone for row in batch["x"].numpy().tolist()]
        assert [valid for _, valid, _ in epoch] == [8, 8, 6]
        states = [state for _, _, state in epoch]
        assert states == [state for _, _, state in found["lanes 4x1"][number]], "the state is that of any mesh"


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", ["filtered", "filtered by node", "filtered by rank 0"])
def test_epochs_of_a_filter_are_those_of_one_rank(found: dict[str, Any], case: str, mesh: str) -> None:
    dataset = FilteredDataset([{"x": number} for number in range(SAMPLES)], lambda sample: sample["x"] % 5 > 0)
    alone = DataLoader(dataset, global_batch_size=8, shuffle=True, seed=3)
    for number, epoch in enumerate(found[f"{case} {mesh}"]):
        assert rows(epoch) == [row for batch in alone for row in batch["x"].numpy().tolist()]
        assert [valid for _, valid, _ in epoch] == [8, 8, 1]
        states = [state for _, _, state in epoch]
        assert states == [state for _, _, state in found["filtered 4x1"][number]], "the state is that of any mesh"


@pytest.mark.parametrize("mesh", MESHES)
def test_what_a_sampler_yields_is_dealt_out_in_its_order(found: dict[str, Any], mesh: str) -> None:
    expected = [*range(0, SAMPLES, 2), 1, 3]
    for number, epoch in enumerate(found[f"sampled {mesh}"]):
        assert rows(epoch) == expected
        assert [valid for _, valid, _ in epoch] == [8, 5]
        states = [state for _, _, state in epoch]
        assert states == [state for _, _, state in found["sampled 4x1"][number]], "the state is that of any mesh"


@pytest.mark.parametrize("mesh", MESHES)
def test_a_sampler_may_yield_a_sample_for_several_ranks_as_a_weighted_one_does(
    found: dict[str, Any], mesh: str
) -> None:
    for epoch in found[f"repeated {mesh}"]:
        assert rows(epoch) == [7, *[3, 5] * 6]


@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_take_one_order_of_a_sampler_that_each_would_draw_anew(found: dict[str, Any], mesh: str) -> None:
    first, second = (rows(epoch) for epoch in found[f"unseeded {mesh}"])
    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    assert first != second
    for epoch in found[f"dropped {mesh}"]:
        assert [len(batch) for batch, _, _ in epoch] == [8, 8]
        assert len(set(rows(epoch))) == 16
