"""An inspection as one HTML page, which needs no script, no other file and no network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from libai_data.commands.inspection.cards import COUNTED, PADDING, Card, data_uri
from libai_data.commands.inspection.fields import FieldReport, in_words, part_of
from libai_data.commands.inspection.findings import Bars
from libai_data.commands.inspection.inspection import STAGES, Inspection
from libai_data.delivery.read_plan import ReadPlan
from libai_data.mesh.parallel_mesh import ParallelMesh

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1f2933; background: #fff; margin: 0 auto; max-width: 1200px;
  padding: 1.2rem; }
h1 { font-size: 1.5rem; margin: 0 0 .6rem; overflow-wrap: anywhere } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: 0 } dt { color: #616e7c }
dd { margin: 0; overflow-wrap: anywhere }
.warnings { background: #fff8e6; border-left: 5px solid #d69e2e; padding: .6rem 1rem .6rem 2rem; margin: 0 }
.warnings li { overflow-wrap: anywhere }
.fine { background: #edf7f0; border-left: 5px solid #2f855a; padding: .6rem 1rem }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(280px, 1fr)); gap: .8rem }
.grid.wide { grid-template-columns: repeat(auto-fill, minmax(500px, 1fr)) }
.card { border: 1px solid #cbd2d9; border-top: 5px solid var(--shard); border-radius: 3px; padding: .6rem }
.card h3 { font-size: .85rem; margin: 0 0 .4rem; overflow-wrap: anywhere } .card p { margin: .3rem 0 }
.source, .name, figcaption, .more { color: #616e7c; font-size: .78rem; overflow-wrap: anywhere }
.stages { display: flex; flex-wrap: wrap; gap: .6rem } figure { margin: 0 } .stages figure { max-width: 112px }
figure img { display: block; image-rendering: pixelated; border: 1px solid #cbd2d9 }
.tokens { font: 13px/1.7 ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap }
.tokens span { border-radius: 2px; box-shadow: inset 0 -1px #cbd2d9; margin-right: 1px }
.tokens .counted { background: #ffd76e } .tokens .padding { color: #b6bfc9; text-decoration: line-through }
.scroll { overflow-x: auto } table { border-collapse: collapse } th, td { border-bottom: 1px solid #e4e7eb; padding:
  .3rem .8rem .3rem 0; text-align: left; white-space: nowrap } th { color: #616e7c; font-weight: 600 }
td.bad { color: #b83232; font-weight: 600 } td.number { text-align: right; font-variant-numeric: tabular-nums }
.bar { background: #3e6fb0; height: .7rem; display: inline-block; min-width: 1px }
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
_MOST_SHOWN = 4  # the figure shows only so many coordinates of an axis, from 0 on
_COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b83280", "#975a16", "#0987a0", "#4a5568")
_CHART_WIDTH, _LETTER_WIDTH = 290, 7


def page_of(found: Inspection) -> str:
    """Write the page.

    Text from data or config is escaped. The policy of the page forbids scripts and external resources.
    """
    title = escape(found.title)
    listed = "".join(f"<li>{escape(each)}</li>" for each in found.findings)
    body = [
        f"<h1>{title}</h1>",
        "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in found.facts) + "</dl>",
        "<h2 id='warnings'>Warnings</h2>",
        f"<ul class='warnings'>{listed}</ul>" if listed else "<p class='fine'>None in the samples that were read.</p>",
        "<h2 id='samples'>Samples</h2>",
        _samples(found.cards),
        "<h2 id='fields'>Fields</h2>",
        _fields(found.reports.values()),
        "<h2 id='mesh'>Which rank has what</h2>",
        f"<div class='scroll'>{mesh_figure(found.mesh, found.reports, found.readers)}</div>",
    ]
    if found.histograms:
        charts = "".join(chart(title, bars) for title, bars in found.histograms.items())
        body += ["<h2 id='histograms'>Labels, lengths, values</h2>", f"<div class='charts'>{charts}</div>"]
    if found.stats:
        body += ["<h2 id='timings'>Where the time goes</h2>", _timings(found.stats)]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">",
            '<meta name="viewport" content="width=device-width">',
            f"<title>{title}</title><style>{_STYLE}</style></head><body>",
            *body,
            "</body></html>",
            "",
        ]
    )


def _samples(cards: Sequence[Card]) -> str:
    kinds = {token.kind for card in cards for _, tokens, _ in card.texts for token in tokens}
    legend = [
        f"<span class='{kind}'>{words}</span>"
        for kind, words in ((COUNTED, "counted by the loss"), (PADDING, "padding"))
        if kind in kinds
    ]
    shown = f"<p class='tokens'>{' '.join(legend)}</p>" if legend else ""
    wide = " wide" if any(card.texts or len(card.pictures) > 2 for card in cards) else ""
    return f"{shown}<div class='grid{wide}'>" + "".join(map(_card, cards)) + "</div>"


def _card(card: Card) -> str:
    parts = [f"<div class='card' style='--shard:{colour_of_shard(card.origin.shard)}'><h3>{escape(card.heading)}</h3>"]
    if card.origin.source:
        parts.append(f"<p class='source'>{escape(card.origin.source)}</p>")
    if card.pictures:
        figures = [
            f"<figure><img src='{data_uri(picture)}' width='{picture.width}' height='{picture.height}' "
            f"alt='{escape(caption, quote=True)}'><figcaption>{escape(caption)}</figcaption></figure>"
            for caption, picture in card.pictures
        ]
        parts.append(f"<div class='stages'>{''.join(figures)}</div>")
    for name, tokens, more in card.texts:
        rest = f"<span class='more'> and {more} more</span>" if more else ""
        words = "".join(f"<span class='{each.kind}' title='{each.id}'>{escape(each.text)}</span>" for each in tokens)
        parts.append(f"<p><span class='name'>{escape(name)}</span></p><p class='tokens'>{words}{rest}</p>")
    parts += [f"<p><span class='name'>{escape(name)}</span> {escape(words)}</p>" for name, words in card.numbers]
    return "".join([*parts, "</div>"])


def _fields(reports: Iterable[FieldReport]) -> str:
    heads = ("field", "dtype", "a sample", "global batch", "least", "largest", "mean", "NaN, inf", "SBP (data, tensor)")
    rows = [f"<tr>{''.join(f'<th>{head}</th>' for head in (*heads, 'placement'))}</tr>"]
    for report in reports:
        sample = f"{list(report.sample_shape)}{' at most' if report.ragged else ''}"
        whole = "cannot be made" if report.shape is None else str(list(report.shape))
        numbers = ["" if each is None else f"{each:.4g}" for each in (report.low, report.high, report.mean)]
        broken = report.nans + report.infinities
        cells = [
            *map(_cell, (report.name, report.dtype, sample)),
            _cell(whole, "bad" if report.shape is None else ""),
            *(_cell(number, "number") for number in numbers),
            _cell(f"{report.nans}, {report.infinities}", "number bad" if broken else "number"),
            *map(_cell, (", ".join(map(str, report.layout.sbp_list)), report.placement)),
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<div class='scroll'><table>{''.join(rows)}</table></div>"


def _cell(text: str, kind: str = "") -> str:
    return f"<td class='{kind}'>{escape(text)}</td>" if kind else f"<td>{escape(text)}</td>"


def _timings(stats: dict[str, Any]) -> str:
    spent = {stage: float(stats.get(f"{stage}_seconds", 0.0)) for stage in STAGES}
    samples, most = stats.get("samples") or 1, max(spent.values()) or 1.0
    rows: list[str] = ["<tr><th>stage</th><th>microseconds a sample</th><th></th></tr>"]
    for stage, seconds in spent.items():
        bar = f"<span class='bar' style='width:{max(200 * seconds / most, 1):.0f}px'></span>"
        rows.append(f"<tr><td>{stage}</td><td class='number'>{seconds / samples * 1e6:,.1f}</td><td>{bar}</td></tr>")
    note = (
        f"Over {stats.get('samples', 0)} samples, the first ones of this process, read without workers. For reliable "
        "numbers, use <code>libai-data profile</code>."
    )
    return f"<table>{''.join(rows)}</table><p class='more'>{note}</p>"


def colour_of_shard(shard: int) -> str:
    """The colour of a data-parallel rank, which is the same in all figures."""
    return _COLOURS[shard % len(_COLOURS)]


def mesh_figure(mesh: ParallelMesh, reports: Mapping[str, FieldReport], readers: str) -> str:
    """Draw the mesh: the data axis to the right, the tensor axis down, and the stages below each other."""
    plan = ReadPlan(mesh, readers)
    fields = [report for report in reports.values() if report.shape is not None]
    sizes = mesh.data_parallel_size, mesh.tensor_parallel_size, mesh.pipeline_parallel_size
    data, tensor, stages = (min(size, _MOST_SHOWN) for size in sizes)
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
        "<p class='more'>Filled: the part of the field that the rank has. Rows are from top to bottom; another dim "
        "that is split is from left to right."
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
        return f"gets shard {plan.mesh.shard_of(rank)} from rank {reader}"
    return f"reads shard {shards[0]}" if len(shards) == 1 else f"reads shards {shards[0]} to {shards[-1]}"


def _held(report: FieldReport, own: ParallelMesh) -> str:
    """A rectangle for the whole field, in which the part on this rank is filled."""
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
    """Counts as a bar chart; only as many bars have a name as there is room for."""
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
