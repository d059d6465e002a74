"""The plan of 1,024 ranks: what following it costs a rank each step, and what it takes in memory."""

from __future__ import annotations

import time
import tracemalloc
from functools import partial

from libai_data.data.samplers import CyclicSampler
from libai_data.data.samplers.sampler import StreamSampler
from libai_data.delivery.read_plan import READERS, ReadPlan
from libai_data.mesh.parallel_mesh import ParallelMesh
from tools.benchmarks.rows import AtMost, Row, Scale, contender

DATA, TENSOR, NODES = 256, 4, 128
ROWS = 8
SAMPLES = 10**8
STEPS = 2000


def rows(scale: Scale) -> list[Row]:
    """The rows of the plan's suite."""
    steps = STEPS // 100 if scale.quick else STEPS
    following = tuple(contender(readers, partial(_microseconds, readers, steps)) for readers in READERS)
    holding = tuple(contender(readers, partial(_megabytes, readers, steps // 20)) for readers in READERS)
    ranks = f"{DATA * TENSOR:,} ranks"
    return [
        Row(
            "step",
            f"which samples a reader takes, and where each of its ranks finds its own, a step and rank of {ranks}",
            "0",
            following,
            tuple(AtMost(each.name, 50, "us") for each in following),
        ),
        Row(
            "memory",
            f"mesh, plan and sampler of a rank that reads, of {ranks}",
            "0",
            holding,
            tuple(AtMost(each.name, 1, "MB") for each in holding),
        ),
    ]


def mesh_of_rank(rank: int) -> ParallelMesh:
    """A rank's own mesh."""
    return ParallelMesh(DATA, TENSOR, 1, rank=rank, num_nodes=NODES)


def reader(readers: str) -> StreamSampler:
    """The stream of rank 0, which reads in every mode: for itself, for its node, or for all."""
    shards = ReadPlan(mesh_of_rank(0), readers).shards_read_by(0)
    return CyclicSampler(range(SAMPLES), ROWS, shuffle=True, data_parallel_size=DATA, seed=1234).serving(shards)


def served_by(plan: ReadPlan) -> list[int]:
    """The ranks that rank 0 reads for."""
    if plan.readers == "every_rank":
        return [0]
    return list(range(plan.mesh.world_size) if plan.readers == "rank0" else plan.ranks_of(0))


def _microseconds(readers: str, steps: int) -> float:
    plan, stream = ReadPlan(mesh_of_rank(0), readers), reader(readers)
    ranks, held = served_by(plan), plan.shards_in_memory_of(0)
    if readers == "rank0":
        steps = max(1, steps // 100)
    taken = stream.batches(0)
    start = time.perf_counter()
    for _ in range(steps):
        next(taken)
        for rank in ranks:
            plan.rows_of(rank, held if readers != "every_rank" else plan.shards_read_by(rank), ROWS)
    return 1e6 * (time.perf_counter() - start) / steps / len(ranks)


def _megabytes(readers: str, steps: int) -> float:
    """The most that Python and numpy hold of it at one time, the samples of a batch included."""
    tracemalloc.start()
    try:
        plan = ReadPlan(mesh_of_rank(0), readers)
        stream = reader(readers)
        for _, batch in zip(range(steps), stream.batches(0)):
            plan.rows_of(0, plan.shards_in_memory_of(0), ROWS)
            del batch
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()
