"""A drawing of the mesh: which rank holds which part of each field, and who reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from libai_data.global_batch.plan import ReadPlan
from libai_data.inspection.drawing import FAINT, INK, LINE, Drawing, colour_of_shard
from libai_data.inspection.field_parts import in_words, part_of
from libai_data.inspection.fields import FieldReport
from libai_data.parallel_mesh import ParallelMesh

MOST_SHOWN = 4
"""Coordinates of an axis that are drawn; of a larger one the first ones."""

_BOX = 230
_GAP = 14
_LINE_HEIGHT = 34
_HEAD = 46
_LEFT = 16


def mesh_drawing(mesh: ParallelMesh, reports: Mapping[str, FieldReport], readers: str = "data_parallel") -> Drawing:
    """Draw the mesh: the data axis runs to the right, the tensor axis down, stages lie below each other.

    Args:
        mesh: the mesh.
        reports: on the fields.
        readers: who reads; see `ReadPlan`.
    """
    plan = ReadPlan(mesh, readers)
    shown = [report for report in reports.values() if report.shape is not None]
    counts = [
        min(size, MOST_SHOWN)
        for size in (mesh.data_parallel_size, mesh.tensor_parallel_size, mesh.pipeline_parallel_size)
    ]
    data, tensor, stages = counts
    box_height = _HEAD + _LINE_HEIGHT * len(shown) + 6
    stage_height = 30 + tensor * (box_height + _GAP)
    drawing = Drawing(
        max(2 * _LEFT + data * (_BOX + _GAP), 640),
        stages * stage_height + 44,
        f"Mesh of {mesh.world_size} ranks: which rank holds which part of each field",
    )
    for stage in range(stages):
        top = stage * stage_height
        layers = [str(layer) for layer, own in enumerate(mesh.layer_stage_ids) if own == stage]
        name = f"pipeline stage {stage} (layers {_run(layers)})" if mesh.pipeline_parallel_size > 1 else "one stage"
        sizes = f"data axis ({mesh.data_parallel_size}) to the right, tensor axis ({mesh.tensor_parallel_size}) down"
        drawing.text(_LEFT, top + 18, f"{name}: {sizes}", 13)
        for rank in mesh.ranks_of_stage(stage):
            own = replace(mesh, rank=rank)
            if own.data_parallel_rank < data and own.tensor_parallel_rank < tensor:
                x = _LEFT + own.data_parallel_rank * (_BOX + _GAP)
                y = top + 30 + own.tensor_parallel_rank * (box_height + _GAP)
                _draw_rank(drawing, (x, y), box_height, own, shown, plan)
    foot = stages * stage_height + 16
    legend = "Filled: what the rank holds of the field. Rows run down, another dim that is split runs across."
    drawing.text(_LEFT, foot, legend, 11, FAINT)
    drawn = data * tensor * stages
    if drawn < mesh.world_size:
        drawing.text(_LEFT, foot + 16, f"{mesh.world_size - drawn} more ranks follow the same pattern.", 11, FAINT)
    return drawing


def _run(layers: Sequence[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"


def _draw_rank(
    drawing: Drawing,
    corner: tuple[int, int],
    height: int,
    own: ParallelMesh,
    reports: Sequence[FieldReport],
    plan: ReadPlan,
) -> None:
    x, y = corner
    colour = colour_of_shard(own.data_parallel_rank)
    drawing.rect(x, y, _BOX, height, "#ffffff", LINE)
    drawing.rect(x, y, _BOX, 5, colour)
    node = f", node {plan.node_of(own.rank)}" if own.num_nodes > 1 else ""
    place = f"data {own.data_parallel_rank}, tensor {own.tensor_parallel_rank}"
    drawing.text(x + 10, y + 22, f"rank {own.rank}  ({place}{node})", 13, INK, room=_BOX - 16)
    drawing.text(x + 10, y + 37, _reading(plan, own.rank), 11, FAINT, room=_BOX - 16)
    for number, report in enumerate(reports):
        top = y + _HEAD + number * _LINE_HEIGHT
        assert report.shape is not None  # those without are not drawn
        part = part_of(report.shape, report.layout, own, own.rank)
        if part is None:
            drawing.text(x + 60, top + 14, report.name, 12, FAINT, room=_BOX - 70)
            drawing.text(x + 60, top + 27, "on another stage", 11, FAINT)
            drawing.rect(x + 10, top + 3, 40, 26, "#ffffff", LINE)
            continue
        drawing.rect(x + 10, top + 3, 40, 26, "#edf0f3", LINE)
        across = next((dim for dim in range(1, len(part)) if part[dim] != slice(0, report.shape[dim])), 1)
        down_from, down_to = _share(part, report.shape, 0)
        from_left, to_right = _share(part, report.shape, across)
        drawing.rect(
            x + 10 + 40 * from_left,
            top + 3 + 26 * down_from,
            max(40 * (to_right - from_left), 1.5),
            max(26 * (down_to - down_from), 1.5),
            colour,
        )
        drawing.text(x + 60, top + 14, report.name, 12, INK, room=_BOX - 70)
        words = f"{in_words(part, report.shape)} of {list(report.shape)}"
        drawing.text(x + 60, top + 27, words, 11, FAINT, room=_BOX - 66)


def _share(part: tuple[slice, ...], shape: Sequence[int], dim: int) -> tuple[float, float]:
    if dim >= len(shape) or not shape[dim]:
        return 0.0, 1.0
    return part[dim].start / shape[dim], part[dim].stop / shape[dim]


def _reading(plan: ReadPlan, rank: int) -> str:
    shards: list[int] = list(plan.shards_read_by(rank))
    if not shards:
        reader = 0 if plan.readers == "rank0" else plan.leader_of(rank)
        return f"gets shard {plan.shard_of(rank)} from rank {reader}"
    return f"reads shard {shards[0]}" if len(shards) == 1 else f"reads shards {shards[0]} to {shards[-1]}"
