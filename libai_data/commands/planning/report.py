"""A job's plan in words and tables."""

from __future__ import annotations

from collections.abc import Sequence

from libai_data.commands.inspection.field_parts import in_words, spread, whole_shape
from libai_data.commands.planning.job import JobPlan
from libai_data.commands.text_table import with_ruled_head
from libai_data.delivery.read_plan import READERS, ReadPlan
from libai_data.delivery.traffic import times_read
from libai_data.errors import bytes_in_words, numbers_in_words

_NODES_SHOWN = 4


def report(job: JobPlan, batches_a_step: int, readers: str) -> list[str]:
    """The plan, line by line.

    Args:
        job: the plan.
        batches_a_step: batches of each rank in a step, accumulated.
        readers: the read mode of the config.
    """
    mode, why = job.recommended()
    return [
        *_job(job, batches_a_step),
        "",
        *_fields(job),
        "",
        *_costs(job, batches_a_step, readers),
        "",
        *_who_reads(job, readers),
        "",
        f"Recommended: dataloader.train.readers={mode}; {why}.",
        "Where only rank 0's machine has the data, readers=rank0 brings them to all.",
    ]


def _job(job: JobPlan, batches_a_step: int) -> list[str]:
    mesh = job.mesh
    rows = job.micro_batch_size * mesh.data_parallel_size * batches_a_step
    accumulated = f" in {batches_a_step} batches" if batches_a_step > 1 else ""
    return [
        f"{mesh.world_size:,} ranks on {mesh.num_nodes:,} node(s): data {mesh.data_parallel_size} x tensor "
        f"{mesh.tensor_parallel_size} x pipeline {mesh.pipeline_parallel_size}; "
        f"{rows:,} samples a step{accumulated}, {job.micro_batch_size} a batch and data-parallel rank."
    ]


def _fields(job: JobPlan) -> list[str]:
    lines: list[Sequence[str]] = [
        ("field", "dtype", "a sample", "a batch, all ranks", "SBP", "rank 0 holds", "last rank", "in all")
    ]
    for field in job.fields:
        shape = whole_shape(job.micro_batch_size, field.sample_shape, field.layout, job.mesh)
        parts = [job.part_held(field, rank) for rank in (0, job.mesh.world_size - 1)]
        in_all = "{:,} part(s), each on {:,} rank(s)".format(*spread(field.layout, job.mesh))
        held = ["nothing" if part is None else in_words(part, shape) for part in parts]
        lines.append(
            (field.name, str(field.dtype), str(list(field.sample_shape)), str(list(shape)))
            + (", ".join(field.layout.sbp_list), *held, in_all)
        )
    return with_ruled_head(lines)


def _costs(job: JobPlan, batches_a_step: int, readers: str) -> list[str]:
    lines: list[Sequence[str]] = [
        (
            "readers",
            "nodes",
            "samples read",
            "of each sample, over all",
            "bytes decoded",
            "bytes received",
            "bytes sent",
            "memory a batch",
        )
    ]
    for mode in READERS:
        often = f"{times_read(ReadPlan(job.mesh, mode)):g} times"
        for cost, nodes in job.costs(mode).items():
            lines.append(
                (
                    f"{mode}{' (config)' if mode == readers else ''}",
                    numbers_in_words(nodes),
                    f"{cost.samples_read * batches_a_step:,}",
                    often,
                    _bytes(cost.bytes_read * batches_a_step),
                    _bytes(cost.bytes_received * batches_a_step),
                    _bytes(cost.bytes_sent * batches_a_step),
                    _bytes(cost.bytes_kept),
                )
            )
    return ["What a step costs each of these nodes:", *with_ruled_head(lines)]


def _who_reads(job: JobPlan, readers: str) -> list[str]:
    plan = ReadPlan(job.mesh, readers)
    lines = [
        f"Who reads (readers={readers}). Part d is that of data-parallel rank d: {job.micro_batch_size} samples, from "
        f"position {job.micro_batch_size} d of the batch on."
    ]
    for node in range(min(job.mesh.num_nodes, _NODES_SHOWN)):
        ranks = plan.ranks_of(node)
        reading = {rank: plan.shards_read_by(rank) for rank in ranks}
        words = [f"rank {rank} part {numbers_in_words(parts)}" for rank, parts in reading.items() if parts]
        lines.append(f"  node {node} (ranks {numbers_in_words(ranks)}): {', '.join(words) or 'nobody; it receives'}")
    if job.mesh.num_nodes > _NODES_SHOWN:
        lines.append(f"  and so on, {job.mesh.num_nodes:,} nodes in all")
    return lines


def _bytes(count: float) -> str:
    return bytes_in_words(count) if count else "-"
