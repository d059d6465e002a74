"""An inspection as one picture: warnings, samples, fields, mesh and histograms below each other."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageDraw

from libai_data.inspection.cards import Card
from libai_data.inspection.drawing import FAINT, INK, LINE, Drawing, Rect, colour_of_shard, width_of
from libai_data.inspection.fields import FieldReport
from libai_data.inspection.inspection import Inspection
from libai_data.inspection.profiling import STAGES
from libai_data.inspection.tokens import COUNTED, PADDING

_WIDTH = 1120
_EDGE = 20
_GAP = 12
_TOKEN_LINES = 8


def picture_of(found: Inspection) -> Image.Image:
    """Draw the picture.

    Args:
        found: what to show.
    """
    blocks: list[Image.Image] = [_text_block(found)]
    blocks += _rows_of_cards(found.cards)
    blocks.append(_table(list(found.reports.values())))
    blocks.append(_drawn(found.mesh))
    charts = [_drawn(drawing) for drawing in found.histograms]
    blocks += _side_by_side(charts)
    height = sum(block.height + _GAP for block in blocks) + 2 * _EDGE
    width = max(_WIDTH, max(block.width for block in blocks)) + 2 * _EDGE
    picture = Image.new("RGB", (width, height), "#ffffff")
    top = _EDGE
    for block in blocks:
        picture.paste(block, (_EDGE, top))
        top += block.height + _GAP
    return picture


def _drawn(drawing: Drawing) -> Image.Image:
    picture = Image.new("RGB", (drawing.width, drawing.height), "#ffffff")
    drawing.paint(ImageDraw.Draw(picture))
    return picture


def _text_block(found: Inspection) -> Image.Image:
    lines = [(found.title, 20, INK)]
    lines += [(f"{name}: {value}", 13, FAINT) for name, value in found.facts]
    if found.stats.get("samples"):
        costs = [f"{stage} {found.stats[f'{stage}_seconds'] / found.stats['samples'] * 1e6:,.1f}" for stage in STAGES]
        lines.append((f"microseconds a sample: {', '.join(costs)}", 13, FAINT))
    for finding in found.findings:
        lines += [(line, 14, "#b7791f") for line in textwrap.wrap(f"! {finding}", 140)]
    if not found.findings:
        lines.append(("No warnings in the samples that were read.", 14, "#2f855a"))
    drawing = Drawing(_WIDTH, sum(size + 7 for _, size, _ in lines) + 4)
    y = 0
    for text, size, colour in lines:
        y += size + 7
        drawing.text(0, y - 5, text, size, colour, room=_WIDTH)
    return _drawn(drawing)


def _rows_of_cards(cards: Sequence[Card]) -> list[Image.Image]:
    wide = any(card.texts for card in cards) or any(len(card.pictures) > 4 for card in cards)
    width = (_WIDTH - _GAP) // 2 if wide else (_WIDTH - 3 * _GAP) // 4
    return _side_by_side([_card(card, width) for card in cards])


def _side_by_side(pictures: Sequence[Image.Image]) -> list[Image.Image]:
    """Rows of pictures, as many in each as there is room for."""
    rows: list[list[Image.Image]] = []
    for picture in pictures:
        if not rows or sum(each.width + _GAP for each in rows[-1]) + picture.width > _WIDTH:
            rows.append([])
        rows[-1].append(picture)
    joined = []
    for row in rows:
        whole = Image.new("RGB", (_WIDTH, max(each.height for each in row)), "#ffffff")
        left = 0
        for each in row:
            whole.paste(each, (left, 0))
            left += each.width + _GAP
        joined.append(whole)
    return joined


def _card(card: Card, width: int) -> Image.Image:
    drawing = Drawing(width, 0)
    room = width - 20
    y = 10
    for line in card.heading.split(": "):
        y += 15
        drawing.text(10, y, line, 12, room=room)
    y += 10
    if card.origin.source:
        drawing.text(10, y + 10, card.origin.source, 11, FAINT, room=room)
        y += 18
    placed: list[Any] = []
    x, tallest = 10, 0
    for caption, picture in card.pictures:
        lines = textwrap.wrap(caption, 17)
        if x + 100 > width and x > 10:
            x, y, tallest = 10, y + tallest + 6, 0
        placed.append((picture, x, y))
        for number, line in enumerate(lines):
            drawing.text(x, y + picture.height + 13 + 13 * number, line, 10, FAINT, room=100)
        tallest = max(tallest, picture.height + 14 + 13 * len(lines))
        x += 112
    y += tallest
    for name, tokens, more in card.texts:
        drawing.text(10, y + 12, name + (f" ({len(tokens)} of {len(tokens) + more})" if more else ""), 11, FAINT)
        y = _draw_tokens(drawing, tokens, y + 17, room)
    for name, words in card.numbers:
        drawing.text(10, y + 14, f"{name}: {words}", 12, room=room)
        y += 18
    drawing.height = y + 10
    drawing.shapes.insert(0, Rect(0, 0, width, drawing.height, "#ffffff", LINE))
    drawing.rect(0, 0, width, 5, colour_of_shard(card.origin.shard))
    whole = _drawn(drawing)
    for picture, left, top in placed:
        whole.paste(picture, (left, top))
    return whole


def _draw_tokens(drawing: Drawing, tokens: Sequence[Any], top: int, room: int) -> int:
    x, line = 10, 0
    for token in tokens:
        text = token.text.replace("\n", "⏎")
        wide = width_of(text, 12) + 2
        if x + wide > 10 + room and x > 10:
            x, line = 10, line + 1
        if line == _TOKEN_LINES:
            drawing.text(10, top + 17 * line + 12, "...", 12, FAINT)
            break
        y = top + 17 * line
        if token.kind == COUNTED:
            drawing.rect(x - 1, y, wide, 16, "#ffd76e")
        drawing.text(x, y + 12, text, 12, "#b6bfc9" if token.kind == PADDING else INK, room=room)
        x += wide + 3
    return top + 17 * (line + 1) + 4


def _table(reports: Sequence[FieldReport]) -> Image.Image:
    heads = ("field", "dtype", "a sample", "global batch", "range", "mean", "SBP", "placement")
    rows = [heads] + [_cells(report) for report in reports]
    widths = [min(max(width_of(row[column], 12) for row in rows) + 16, 260) for column in range(len(heads))]
    drawing = Drawing(max(_WIDTH, sum(widths)), 24 * len(rows) + 6)
    for number, row in enumerate(rows):
        x = 0
        for text, width in zip(row, widths):
            drawing.text(x, 24 * number + 18, text, 12, INK if number else FAINT, room=width - 6)
            x += width
        drawing.rect(0, 24 * number + 24, drawing.width, 1, LINE)
    return _drawn(drawing)


def _cells(report: FieldReport) -> Any:
    numbers = "" if report.low is None else f"{report.low:.4g} to {report.high:.4g}"
    broken = f" ({report.nans} NaN, {report.infinities} inf)" if report.nans + report.infinities else ""
    return (
        report.name,
        report.dtype,
        str(list(report.sample_shape)) + (" at most" if report.ragged else ""),
        "cannot be made" if report.shape is None else str(list(report.shape)),
        numbers + broken,
        "" if report.mean is None else f"{report.mean:.4g}",
        ", ".join(map(str, report.layout.sbp_list)),
        report.placement,
    )
