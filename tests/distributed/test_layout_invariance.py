"""No layout, read mode or resumption changes one bit of a global batch, and each rank gets just its part."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

from libai_data.global_generators import seeded
from libai_data.mesh import ParallelMesh
from libai_data.mixing import combine64
from libai_data.sample_random import reading_samples
from libai_data.samplers import CyclicSampler, Order
from libai_data.structures import Instance
from tests.distributed.launcher import launch_ranks
from tests.distributed.scripts.many_layouts import CASES, LAYOUTS, MESHES, SAMPLES, SEED, Case, ManyLayouts
from tests.properties import slowly

SCRIPT = Path(__file__).parent / "scripts" / "deliver_batches.py"

Delivered = dict[str, dict[str, list[dict[str, Any]]]]
"""Case -> mesh -> batches; see the script."""

everywhere = pytest.mark.parametrize(
    ("world_size", "mesh"),
    [
        slowly(world_size, mesh) if world_size == 2 else (world_size, mesh)
        for world_size, meshes in MESHES.items()
        for mesh in meshes
    ],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else f"world {value}",
)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def delivered_to(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Delivered]]:
    """What each rank of a world got; each world is launched once, when it is first asked for."""
    worlds: dict[int, list[Delivered]] = {}

    def deliver(world_size: int) -> list[Delivered]:
        if world_size not in worlds:
            folder = tmp_path_factory.mktemp("delivered")
            launch = launch_ranks(SCRIPT, world_size, str(folder), timeout=150)
            assert launch.returncode == 0, launch.output
            files = [folder / f"{world_size}-{rank}.json" for rank in range(world_size)]
            worlds[world_size] = [json.loads(file.read_text()) for file in files]
        return worlds[world_size]

    return deliver


def true_batch(case: Case, step: int) -> dict[str, np.ndarray]:
    """A global batch, read sample by sample with nothing but the dataset and the order."""
    positions = case.position + step * case.global_batch_size + np.arange(case.global_batch_size)
    samples = []
    for epoch, index in zip(*(found.tolist() for found in Order(SAMPLES, SEED).locate(positions))):
        key = SEED, epoch, index
        with reading_samples((key,)), seeded(combine64(*key)):
            samples.append(ManyLayouts()[index])
    batch = Instance.stack(samples)
    return {name: batch.get(name).tensor for name in LAYOUTS}


def part_of(whole: np.ndarray, name: str, mesh: ParallelMesh) -> Any:
    """What a rank is to hold of a field; None on ranks of another stage."""
    sbp_list, placement_idx = LAYOUTS[name]
    stage = 0 if placement_idx == 0 else mesh.pipeline_parallel_size - 1
    if mesh.pipeline_parallel_rank != stage:
        return None
    axes = [
        (mesh.data_parallel_size, mesh.data_parallel_rank),
        (mesh.tensor_parallel_size, mesh.tensor_parallel_rank),
    ]
    for sbp, (parts, own) in zip(sbp_list, axes):
        if sbp != "broadcast":
            whole = np.split(whole, parts, axis=int(sbp.split("_")[1]))[own]
    return whole


def digest(array: np.ndarray) -> str:
    content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
    return f"{array.dtype} {list(array.shape)} {content}"


@everywhere
@each_case
def test_each_global_batch_is_bit_for_bit_that_of_a_single_rank(
    world_size: int, mesh: Any, case: Case, delivered_to: Callable[[int], list[Delivered]]
) -> None:
    batches = delivered_to(world_size)[0][case.name]["x".join(map(str, mesh))]
    single = delivered_to(1)[0][case.name]["1x1x1"]
    assert len(batches) == case.steps
    for step, batch in enumerate(batches):
        truth = {name: digest(array) for name, array in true_batch(case, step).items()}
        assert {name: batch[name][1] for name in LAYOUTS} == truth
        assert {name: single[step][name][1] for name in LAYOUTS} == truth


@everywhere
@each_case
def test_each_rank_holds_just_the_part_that_its_layout_asks_for(
    world_size: int, mesh: Any, case: Case, delivered_to: Callable[[int], list[Delivered]]
) -> None:
    for step in range(case.steps):
        truth = true_batch(case, step)
        for rank, delivered in enumerate(delivered_to(world_size)):
            data, tensor, pipeline = mesh
            coordinates = ParallelMesh(data, tensor, pipeline, rank=rank)
            parts = {name: part_of(whole, name, coordinates) for name, whole in truth.items()}
            batch = delivered[case.name]["x".join(map(str, mesh))][step]
            expected = {name: None if part is None else digest(part) for name, part in parts.items()}
            assert {name: batch[name][0] for name in LAYOUTS} == expected, f"step {step}, rank {rank}"


@everywhere
@each_case
def test_all_ranks_stand_at_the_same_place_and_save_the_same_state(
    world_size: int, mesh: Any, case: Case, delivered_to: Callable[[int], list[Delivered]]
) -> None:
    for step in range(case.steps):
        position = case.position + step * case.global_batch_size
        sampler = CyclicSampler(range(SAMPLES), 1, shuffle=True, seed=SEED)
        sampler.set_consumed_samples(position + case.global_batch_size)
        for delivered in delivered_to(world_size):
            batch = delivered[case.name]["x".join(map(str, mesh))][step]
            assert (batch["position"], batch["valid"]) == (position, case.global_batch_size)
            assert batch["state"] == {**sampler.state_dict(), "dataset": {"name": "ManyLayouts"}}


# The loader takes the epoch of a rank's own first row for that of the global batch; IndexBatch.epoch is the right one.
@pytest.mark.parametrize("world_size", [1, slowly(2), 4])
def test_all_ranks_name_the_epoch_of_the_global_batchs_first_sample(
    world_size: int, delivered_to: Callable[[int], list[Delivered]]
) -> None:
    for delivered in delivered_to(world_size):
        for case in CASES:
            for batches in delivered[case.name].values():
                expected = [(case.position + step * case.global_batch_size) // SAMPLES for step in range(case.steps)]
                assert [batch["epoch"] for batch in batches] == expected, case.name
