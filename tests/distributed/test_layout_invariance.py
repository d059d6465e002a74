"""No layout, read mode or resumption changes one bit of a global batch, and each rank gets just its part."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

from libai_data.data.random.global_generators import seeded
from libai_data.data.random.hashing import combine64
from libai_data.data.random.sample_random import reading_samples
from libai_data.data.samplers import Order
from libai_data.mesh.parallel_mesh import ParallelMesh
from libai_data.structures import Instance
from tests.distributed.launcher import found_by_ranks, once_for_each, ranks_of
from tests.distributed.scripts.many_layouts import CASES, LAYOUTS, SAMPLES, SEED, Case, ManyLayouts, digest
from tests.properties import slowly

SCRIPT = Path(__file__).parent / "scripts" / "deliver_batches.py"

Delivered = dict[str, dict[str, list[dict[str, Any]]]]
"""Case -> mesh -> batches; see the script."""

SHORT = (("1x1x1",), ("2x2x1", "1x2x2"))
LONG = (("2x1x1", "1x2x1", "1x1x2"), ("4x1x1", "1x4x1", "2x1x2"), ("3x2x1", "2x1x3"))
"""Meshes of each launch in the short run, and of those that the long run adds."""

everywhere = pytest.mark.parametrize("mesh", [*sum(SHORT, ()), *map(slowly, sum(LONG, ()))])
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def delivered_to(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Delivered]]:
    """What each rank of a mesh got."""

    def deliver(meshes: tuple[str, ...]) -> list[Delivered]:
        folder = tmp_path_factory.mktemp("delivered")
        return found_by_ranks(SCRIPT, ranks_of(meshes[0]), folder, *meshes, timeout=150)

    return once_for_each(SHORT + LONG, deliver)


@cache
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


@everywhere
@each_case
def test_each_global_batch_is_bit_for_bit_that_of_a_single_rank(
    mesh: str, case: Case, delivered_to: Callable[[str], list[Delivered]]
) -> None:
    batches = delivered_to(mesh)[0][case.name][mesh]
    single = delivered_to("1x1x1")[0][case.name]["1x1x1"]
    assert len(batches) == case.steps
    for step, batch in enumerate(batches):
        truth = {name: digest(array) for name, array in true_batch(case, step).items()}
        assert {name: batch[name][1] for name in LAYOUTS} == truth
        assert {name: single[step][name][1] for name in LAYOUTS} == truth


@everywhere
@each_case
def test_each_rank_holds_just_the_part_that_its_layout_asks_for(
    mesh: str, case: Case, delivered_to: Callable[[str], list[Delivered]]
) -> None:
    for step in range(case.steps):
        truth = true_batch(case, step)
        for rank, delivered in enumerate(delivered_to(mesh)):
            data, tensor, pipeline = map(int, mesh.split("x"))
            coordinates = ParallelMesh(data, tensor, pipeline, rank=rank)
            parts = {name: part_of(whole, name, coordinates) for name, whole in truth.items()}
            batch = delivered[case.name][mesh][step]
            expected = {name: None if part is None else digest(part) for name, part in parts.items()}
            assert {name: batch[name][0] for name in LAYOUTS} == expected, f"step {step}, rank {rank}"
