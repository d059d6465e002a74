"""Figures of the page: which rank holds which part of each field, and how often values occur."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape

from libai_data.commands.inspection.field_parts import in_words, part_of
from libai_data.commands.inspection.fields import FieldReport
from libai_data.commands.inspection.histograms import Bars
from libai_data.delivery.read_plan import ReadPlan
from libai_data.mesh.parallel_mesh import ParallelMesh

STYLE = """
.mesh { display: grid; gap: 14px } .held { display: flex; gap: 10px; margin-top: 5px }
.rank { border: 1px solid #cbd2d9; border-top: 5px solid var(--shard); padding: 5px 10px; font-size: 13px }
.mesh small { color: #7b8794; display: block; overflow-wrap: anywhere; font-size: 11px; line-height: 1.2 }
.whole { position: relative; flex: none; width: 40px; height: 26px; border: 1px solid #cbd2d9; background: #edf0f3 }
.elsewhere { color: #7b8794 } .elsewhere .whole { background: #fff }
.whole i { position: absolute; background: var(--shard); min-width: 1px; min-height: 1px }
.charts { display: flex; flex-wrap: wrap; gap: 1.5rem } .charts figure { width: 340px; font-size: 11px; color: #7b8794 }
.charts figcaption { font-size: 13px; color: #1f2933; margin-bottom: 8px }
.bars { display: flex; position: relative; height: 108px; margin: 0 8px 24px 40px; background: #f8f9fa;
  outline: 1px solid #cbd2d9 } .bars div { flex: 1; position: relative; margin: 0 .5px }
.bars i { position: absolute; bottom: 0; width: 100%; background: #3e6fb0 }
.bars span { position: absolute; top: 100%; left: 50%; transform: translateX(-50%); padding-top: 3px;
  white-space: nowrap }
.bars::before { content: attr(data-most); position: absolute; right: 100%; padding-right: 5px }
.bars::after { content: "0"; position: absolute; right: 100%; padding-right: 5px; bottom: -3px }
"""
MOST_SHOWN = 4
"""Coordinates of an axis that are shown; of a larger one the first ones."""

_COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b83280", "#975a16", "#0987a0", "#4a5568")
_CHART_WIDTH, _LETTER_WIDTH = 290, 7


def colour_of_shard(shard: int) -> str:
    """The colour of a data-parallel rank, the same in all figures."""
    return _COLOURS[shard % len(_COLOURS)]


def mesh_figure(mesh: ParallelMesh, reports: Mapping[str, FieldReport], readers: str) -> str:
    """The mesh: the data axis runs to the right, the tensor axis down, stages lie below each other.

    Args:
        mesh: the mesh.
        reports: on the fields.
        readers: who reads; see `ReadPlan`.
    """
    plan = ReadPlan(mesh, readers)
    fields = [report for report in reports.values() if report.shape is not None]
    sizes = mesh.data_parallel_size, mesh.tensor_parallel_size, mesh.pipeline_parallel_size
    data, tensor, stages = (min(size, MOST_SHOWN) for size in sizes)
    parts: list[str] = []
    for stage in range(stages):
        layers = [layer for layer, own in enumerate(mesh.layer_stage_ids) if own == stage]
        run = f"{layers[0]} to {layers[-1]}" if len(layers) > 1 else str(layers[0])
        name = f"pipeline stage {stage} (layers {run})" if sizes[2] > 1 else "one stage"
        parts.append(f"<p>{name}: data axis ({sizes[0]}) to the right, tensor axis ({sizes[1]}) down</p>")
        shown = [replace(mesh, rank=rank) for rank in mesh.ranks_of_stage(stage)]
        shown = [own for own in shown if own.data_parallel_rank < data and own.tensor_parallel_rank < tensor]
        shown.sort(key=lambda own: (own.tensor_parallel_rank, own.data_parallel_rank))
        ranks = "".join(_rank(own, fields, plan) for own in shown)
        parts.append(f"<div class='mesh' style='grid-template-columns: repeat({data}, 230px)'>{ranks}</div>")
    parts.append(
        "<p class='more'>Filled: what the rank holds of the field. "
        "Rows run down, another dim that is split runs across."
    )
    if data * tensor * stages < mesh.world_size:
        parts.append(f"<br>{mesh.world_size - data * tensor * stages} more ranks follow the same pattern.")
    return "".join([*parts, "</p>"])


def _rank(own: ParallelMesh, fields: Sequence[FieldReport], plan: ReadPlan) -> str:
    node = f", node {plan.node_of(own.rank)}" if own.num_nodes > 1 else ""
    return (
        f"<div class='rank' style='--shard:{colour_of_shard(own.data_parallel_rank)}'>"
        f"rank {own.rank} (data {own.data_parallel_rank}, tensor {own.tensor_parallel_rank}{node})"
        f"<small>{_reading(plan, own.rank)}</small>{''.join(_held(report, own) for report in fields)}</div>"
    )


def _reading(plan: ReadPlan, rank: int) -> str:
    shards: list[int] = list(plan.shards_read_by(rank))
    if not shards:
        reader = 0 if plan.readers == "rank0" else plan.leader_of(rank)
        return f"gets shard {plan.shard_of(rank)} from rank {reader}"
    return f"reads shard {shards[0]}" if len(shards) == 1 else f"reads shards {shards[0]} to {shards[-1]}"


def _held(report: FieldReport, own: ParallelMesh) -> str:
    """A rectangle for the whole field, with what the rank holds filled."""
    name, shape = escape(report.name), report.shape or ()
    part = part_of(shape, report.layout, own, own.rank)
    if part is None:
        words = f"<div>{name}<small>on another stage</small></div>"
        return f"<div class='held elsewhere'><div class='whole'></div>{words}</div>"
    across = next((dim for dim in range(1, len(part)) if part[dim] != slice(0, shape[dim])), 1)
    (top, bottom), (left, right) = (_share(part, shape, dim) for dim in (0, across))
    filled = f"top:{top:.2%};left:{left:.2%};width:{right - left:.2%};height:{bottom - top:.2%}"
    return (
        f"<div class='held'><div class='whole'><i style='{filled}'></i></div>"
        f"<div>{name}<small>{in_words(part, shape)} of {list(shape)}</small></div></div>"
    )


def _share(part: tuple[slice, ...], shape: Sequence[int], dim: int) -> tuple[float, float]:
    if dim >= len(shape) or not shape[dim]:
        return 0.0, 1.0
    return part[dim].start / shape[dim], part[dim].stop / shape[dim]


def chart(title: str, bars: Bars) -> str:
    """Counts as bars, of which as many are named as there is room for.

    Args:
        title: above the bars.
        bars: (what is counted, how often).
    """
    most = max(count for _, count in bars) or 1
    every = -(-max(len(name) for name, _ in bars) * _LETTER_WIDTH * len(bars) // _CHART_WIDTH)
    columns = [
        f"<div title='{name}: {count}'><i style='height:{count / most:.2%}'></i>"
        f"{f'<span>{name}</span>' if number % every == 0 else ''}</div>"
        for number, (name, count) in enumerate(bars)
    ]
    return (
        f"<figure><figcaption>{escape(title)}</figcaption><div class='bars' data-most='{most}'>{''.join(columns)}</div>"
        "</figure>"
    )
