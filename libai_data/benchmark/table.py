"""The table of results, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from libai_data.benchmark.claims import AtLeast
from libai_data.benchmark.rounds import Measured
from libai_data.text_table import with_ruled_head

HEADER = ("row", "work", "workers", "measured", "median", "rounds", "demanded", "met")

_DISTURBED = 0.1


def table(results: Sequence[Measured]) -> str:
    """One line for each claim, and below each row its contenders' medians."""
    lines: list[Sequence[str]] = [HEADER]
    notes: list[str] = []
    for result in results:
        lines += _claims(result)
        notes.append(f"  {result.row.name}: {_medians(result)}")
    return "\n".join([*with_ruled_head(lines), "", "Medians over the rounds:", *notes, *_warning(results)])


def _warning(results: Sequence[Measured]) -> list[str]:
    others = [share for result in results for share in result.others]
    if not others or median(others) < _DISTURBED:
        return []
    share = 100 * median(others)
    return ["", f"Other processes took {share:.0f} % of the cores meanwhile: measure again on a quiet machine."]


def _claims(result: Measured) -> list[Sequence[str]]:
    lines: list[Sequence[str]] = []
    head: Sequence[str] = (result.row.name, result.row.work, result.row.workers)
    for claim in result.row.claims:
        verdict = claim.judge(result.values, result.missing)
        if verdict.value is None:
            found = ["-", verdict.reason]
        else:
            low, high = verdict.spread
            found = [claim.show(verdict.value), f"{claim.show(low)} .. {claim.show(high)}"]
        met = {True: "yes", False: "NO", None: ""}[verdict.met]
        lines.append([*head, verdict.subject, *found, claim.demand, met])
        head = ("", "", "")
    return lines


def _medians(result: Measured) -> str:
    compares = any(isinstance(claim, AtLeast) for claim in result.row.claims)
    parts = [
        f"{name} {1e3 * median(values):.3g} ms" if compares else f"{name} {median(values):.3g}"
        for name, values in result.values.items()
    ]
    return ", ".join(parts + [f"{name}: {reason}" for name, reason in result.missing.items()])
