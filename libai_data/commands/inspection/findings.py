"""Findings about the samples of a step: what looks wrong, and how often values occur."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from libai_data.commands.inspection.fields import (
    LABELS,
    FieldReport,
    is_class_label,
    is_mask,
    is_padding_mask,
    is_tokens,
)
from libai_data.commands.inspection.step_rows import StepRows
from libai_data.config import try_get_key
from libai_data.iterables.digest import running_digest

Bars = list[tuple[str, int]]
"""(What is counted, how often)."""

_NAMED = 5
_MOST_BARS = 32
_IGNORED_LABELS = (-1, -100)  # the usual loss functions ignore tokens with these labels


def findings(rows: StepRows, reports: Mapping[str, FieldReport], cfg: Any) -> list[str]:
    """Find what looks wrong in the samples: one sentence for each problem, with the names of fields and samples.

    The config limits labels by `num_classes` of the model, and token ids by `vocab_size`.
    """
    found: list[str] = []
    for name, report in reports.items():
        if report.problem:
            found.append(f"Field '{name}' cannot become a global tensor on this mesh: {report.problem}.")
        for count, what, test in ((report.nans, "NaN", np.isnan), (report.infinities, "infinite", np.isinf)):
            if count:
                where = _named(rows, [row for row, array in enumerate(rows.values[name]) if test(array).any()])
                found.append(f"Field '{name}' has {count} number(s) that are {what}, in {where}.")
        is_one_number = report.low is not None and report.low == report.high and not report.nans + report.infinities
        if is_one_number and len(rows.origins) > 1:
            found.append(f"Field '{name}' is constant: each of its numbers, in all rows read, is {report.low:g}.")
        found += _out_of_range(rows, name, cfg)
    return found + list(_duplicates(rows))


def _out_of_range(rows: StepRows, name: str, cfg: Any) -> Iterator[str]:
    values = rows.values[name]
    classes, vocabulary = (
        try_get_key(cfg, f"model.{key}", f"model.cfg.{key}") for key in ("num_classes", "vocab_size")
    )
    may_be: tuple[int, ...] = ()
    if is_class_label(name, values[0]) and isinstance(classes, int) and classes > 0:
        limit, what = classes, "classes"
    elif is_tokens(name, values[0]) and isinstance(vocabulary, int) and vocabulary > 0 and not is_mask(name, values[0]):
        limit, what = vocabulary, "tokens"
        may_be = _IGNORED_LABELS if name.lower() in LABELS else ()
    else:
        return
    wrong: dict[int, list[int]] = {}
    for row, array in enumerate(values):
        outside = array[((array < 0) | (array >= limit)) & ~np.isin(array, may_be)]
        for value in np.unique(outside).tolist():
            wrong.setdefault(value, []).append(row)
    if wrong:
        worst = ", ".join(map(str, sorted(wrong)[:_NAMED])) + (", ..." if len(wrong) > _NAMED else "")
        where = _named(rows, sorted({row for every in wrong.values() for row in every}))
        allowed = f"the model has {limit} {what}, 0 to {limit - 1}"
        yield f"Field '{name}' is out of range: {allowed}; found {worst} in {where}."


def _duplicates(rows: StepRows) -> Iterator[str]:
    groups: dict[str, list[int]] = {}
    for row in range(len(rows.origins)):
        # Not a list, which would be one array if each field is a number.
        fields = tuple(values[row] for values in rows.values.values())
        groups.setdefault(running_digest("", fields), []).append(row)
    twice = [group for group in groups.values() if len(group) > 1]
    for group in twice[:_NAMED]:
        indices = {rows.origins[row].index for row in group}
        why = " The step continues into the next epoch." if None not in indices and len(indices) == 1 else ""
        yield f"Duplicated sample: {_named(rows, group)} are equal in every field.{why}"
    if len(twice) > _NAMED:
        yield f"There are {len(twice) - _NAMED} more groups of equal samples."


def _named(rows: StepRows, which: list[int]) -> str:
    names = [rows.origins[row].name for row in which[:_NAMED]]
    return ", ".join(names) + (f" and {len(which) - _NAMED} more" if len(which) > _NAMED else "")


def histograms(rows: StepRows, raw_lengths: Mapping[str, list[int]]) -> dict[str, Bars]:
    """Histograms of a step: title -> bars.

    Counts the values of integer fields with one number per sample, the marked places of masks, the finite numbers of
    floating-point fields, and the lengths of padded fields before padding (`raw_lengths`).
    """
    labels: dict[str, Bars] = {}
    lengths = {f"{name}: lengths before padding": _counted(each) for name, each in raw_lengths.items() if each}
    numbers: dict[str, Bars] = {}
    for name, values in rows.values.items():
        if all(value.size == 1 and value.dtype.kind in "iu" for value in values) or is_class_label(name, values[0]):
            labels[f"{name}: samples by value"] = _counted([int(value.reshape(-1)[0]) for value in values])
        if is_padding_mask(name, values[0]) or (is_mask(name, values[0]) and values[0].ndim == 1):
            what = "tokens" if is_padding_mask(name, values[0]) else "places"
            lengths[f"{name}: marked {what} a sample"] = _counted(list(map(np.count_nonzero, values)))
        if values[0].dtype.kind == "f":
            every = np.concatenate([value.reshape(-1) for value in values]).astype(np.float64)
            if np.isfinite(every).any():
                numbers[f"{name}: numbers by value"] = _counted_in_ranges(every[np.isfinite(every)])
    return {**labels, **lengths, **numbers}


def _counted(values: Sequence[int]) -> Bars:
    """Count each value if there are few, else ranges of equal width; values that do not occur count as 0."""
    low, high = min(values), max(values)
    step = -(-(high - low + 1) // _MOST_BARS)
    counts = Counter((value - low) // step for value in values)
    starts = range(low, high + 1, step)
    names = [str(start) if step == 1 else f"{start} to {start + step - 1}" for start in starts]
    return [(name, counts[number]) for number, name in enumerate(names)]


def _counted_in_ranges(numbers: np.ndarray) -> Bars:
    """Count finite numbers in ranges of equal width."""
    low, high = numbers.min(), numbers.max()
    if low == high:
        return [(f"{low:g}", len(numbers))]
    # Of quarters, because the distance between the largest floats is infinite.
    bars, limits = np.histogram(numbers / 4, _MOST_BARS)
    return [(f"{4 * edge:.3g}", int(count)) for edge, count in zip(limits.tolist(), bars.tolist())]
