"""Histograms: of labels, of lengths, of values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from libai_data.inspection.drawing import FAINT, INK, LINE, Drawing
from libai_data.inspection.field_kinds import is_class_label, is_mask, is_padding_mask
from libai_data.inspection.step_rows import StepRows

_WIDTH, _HEIGHT = 340, 170
_LEFT, _TOP, _BOTTOM = 40, 34, 28
_BAR = "#3e6fb0"
_MOST_BARS = 32

Bars = list[tuple[str, int]]


def counted(values: Sequence[float], whole: bool) -> Bars:
    """Count values by themselves where they are few, else in ranges of equal width.

    Args:
        values: finite numbers, at least one.
        whole: they are integers; ranges then are too.

    Returns:
        (what is counted, how often), from the least to the largest; gaps between few integers count as 0.
    """
    array = np.asarray(values)
    low, high = array.min(), array.max()
    if whole and high - low < _MOST_BARS:
        return [(str(each), int((array == each).sum())) for each in range(int(low), int(high) + 1)]
    if low == high:
        return [(f"{low:g}", len(array))]
    if whole:
        step = -(-(int(high) - int(low) + 1) // _MOST_BARS)
        edges = np.arange(int(low), int(high) + step + 1, step)
        bars, _ = np.histogram(array, edges)
        return [(f"{edge} to {edge + step - 1}", int(count)) for edge, count in zip(edges.tolist(), bars.tolist())]
    bars, limits = np.histogram(array.astype(np.float64), _MOST_BARS)
    return [(f"{edge:.3g}", int(count)) for edge, count in zip(limits.tolist(), bars.tolist())]


def histogram(title: str, bars: Bars) -> Drawing:
    """Draw counts as bars.

    Args:
        title: above the bars.
        bars: (what is counted, how often).
    """
    drawing = Drawing(_WIDTH, _HEIGHT, title)
    drawing.text(8, 18, title, 13, INK, room=_WIDTH - 16)
    most = max(count for _, count in bars)
    room, height = _WIDTH - _LEFT - 8, _HEIGHT - _TOP - _BOTTOM
    width = room / len(bars)
    drawing.rect(_LEFT, _TOP, room, height, "#f8f9fa", LINE)
    drawing.text(_LEFT - 5, _TOP + 10, str(most), 11, FAINT, "end")
    drawing.text(_LEFT - 5, _TOP + height, "0", 11, FAINT, "end")
    every = max(1, -(-max(len(name) for name, _ in bars) * 7 * len(bars) // room))
    for number, (name, count) in enumerate(bars):
        tall = height * count / most if most else 0
        drawing.rect(_LEFT + number * width + 1, _TOP + height - tall, max(width - 2, 1), tall, _BAR)
        if number % every == 0:
            drawing.text(_LEFT + (number + 0.5) * width, _HEIGHT - 12, name, 11, FAINT, "middle")
    return drawing


def label_histograms(rows: StepRows) -> dict[str, Drawing]:
    """How often each label occurs: integer fields of one number a sample, and those called like labels."""
    drawings = {}
    for name, values in rows.values.items():
        is_number = all(value.size == 1 and value.dtype.kind in "iu" for value in values)
        if is_number or is_class_label(name, values[0]):
            bars = counted([int(value.reshape(-1)[0]) for value in values], whole=True)
            drawings[name] = histogram(f"{name}: samples by value", bars)
    return drawings


def length_histograms(rows: StepRows, raw_lengths: dict[str, list[int]]) -> dict[str, Drawing]:
    """How long sequences are: before padding, by masks, and by the batches' own shapes where these change.

    Args:
        rows: of a step.
        raw_lengths: field -> length of each sample before a collator padded it.
    """
    lengths = {f"{name}: lengths before padding": each for name, each in raw_lengths.items() if each}
    for name, values in rows.values.items():
        if is_padding_mask(name, values[0]):
            lengths[f"{name}: marked tokens a sample"] = [int(np.count_nonzero(value)) for value in values]
        elif is_mask(name, values[0]) and values[0].ndim == 1:
            lengths[f"{name}: marked places a sample"] = [int(np.count_nonzero(value)) for value in values]
    return {title: histogram(title, counted(each, whole=True)) for title, each in lengths.items()}


def value_histogram(name: str, values: Sequence[np.ndarray]) -> Drawing | None:
    """How the finite numbers of a floating-point field are spread; None without any."""
    if values[0].dtype.kind != "f":
        return None
    numbers = np.concatenate([value.reshape(-1) for value in values]).astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    return histogram(f"{name}: numbers by value", counted(finite, whole=False)) if finite.size else None
