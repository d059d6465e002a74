"""Histograms: of labels, of lengths, of values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from libai_data.commands.inspection.field_kinds import is_class_label, is_mask, is_padding_mask
from libai_data.commands.inspection.step_rows import StepRows

Bars = list[tuple[str, int]]
"""(What is counted, how often)."""

_MOST_BARS = 32


def histograms(rows: StepRows, raw_lengths: Mapping[str, list[int]]) -> dict[str, Bars]:
    """What is counted, in words, and its bars.

    Of integer fields of one number a sample the values, of masks the marked places, of floating-point fields the finite
    numbers.

    Args:
        rows: of a step.
        raw_lengths: field -> length of each sample before a collator padded it.
    """
    labels: dict[str, Bars] = {}
    lengths = {f"{name}: lengths before padding": _counted(each, True) for name, each in raw_lengths.items() if each}
    numbers: dict[str, Bars] = {}
    for name, values in rows.values.items():
        if all(value.size == 1 and value.dtype.kind in "iu" for value in values) or is_class_label(name, values[0]):
            labels[f"{name}: samples by value"] = _counted([int(value.reshape(-1)[0]) for value in values], True)
        if is_padding_mask(name, values[0]) or (is_mask(name, values[0]) and values[0].ndim == 1):
            what = "tokens" if is_padding_mask(name, values[0]) else "places"
            lengths[f"{name}: marked {what} a sample"] = _counted(list(map(np.count_nonzero, values)), True)
        if values[0].dtype.kind == "f":
            every = np.concatenate([value.reshape(-1) for value in values]).astype(np.float64)
            if np.isfinite(every).any():
                numbers[f"{name}: numbers by value"] = _counted(every[np.isfinite(every)], False)
    return {**labels, **lengths, **numbers}


def _counted(values: Sequence[float] | np.ndarray, whole: bool) -> Bars:
    """Count values by themselves where they are few, else in ranges of equal width; gaps of integers count as 0."""
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
    bars, limits = np.histogram(array, _MOST_BARS)
    return [(f"{edge:.3g}", int(count)) for edge, count in zip(limits.tolist(), bars.tolist())]
