"""Results: a table for a terminal, and every raw number as JSON."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from libai_data.commands.console import with_ruled_head
from tools.benchmarks.rows import AtLeast, AtMost, Measured, Verdict

PACKAGES = ("libai_data", "oneflow", "numpy", "flowvision", "simplejpeg", "array_record")
_HEADER = ("row", "work", "workers", "measured", "median", "rounds", "demanded", "met")

_DISTURBED = 0.1


def table(results: Sequence[Measured]) -> str:
    """One line for each claim, and below each row its contenders' medians."""
    lines: list[Sequence[str]] = [_HEADER]
    notes: list[str] = []
    for result in results:
        lines += _claim_lines(result)
        notes.append(f"  {result.row.name}: {_medians(result)}")
    return "\n".join(
        [*with_ruled_head(lines), "", "Medians over the rounds (processor time):", *notes, *_warning(results)]
    )


def _warning(results: Sequence[Measured]) -> list[str]:
    others = [share for result in results for share in result.others]
    if not others or median(others) < _DISTURBED:
        return []
    share = 100 * median(others)
    return ["", f"Other processes took {share:.0f} % of the cores meanwhile: measure again on a quiet machine."]


def _claim_lines(result: Measured) -> list[Sequence[str]]:
    lines: list[Sequence[str]] = []
    head: Sequence[str] = (result.row.name, result.row.work, result.row.workers)
    for claim in result.row.claims:
        verdict = claim.judge(result.values, result.missing)
        found = _shown(claim, verdict) or ["-", verdict.reason]
        met = {True: "yes", False: "NO", None: ""}[verdict.met]
        lines.append([*head, verdict.subject, *found, claim.demand, met])
        head = ("", "", "")
    return lines


def _shown(claim: AtLeast | AtMost, verdict: Verdict) -> list[str]:
    """Median and spread, as text; nothing if the claim was not measured."""
    if verdict.value is None:
        return []
    low, high = verdict.spread
    return [claim.show(verdict.value), f"{claim.show(low)} .. {claim.show(high)}"]


def _medians(result: Measured) -> str:
    compares = any(isinstance(claim, AtLeast) for claim in result.row.claims)
    parts = []
    for name, values in result.values.items():
        parts.append(f"{name} {1e3 * median(values):.3g} ms" if compares else f"{name} {median(values):.3g}")
        if name in result.processor:
            parts[-1] += f" ({1e3 * median(result.processor[name]):.3g})"
    return ", ".join(parts + [f"{name}: {reason}" for name, reason in result.missing.items()])


def report(
    suite: str, rounds: int, quick: bool, results: Sequence[Measured], peers: Mapping[str, str]
) -> dict[str, Any]:
    """All that was measured, as JSON-able data; `peers` has the versions of their environment."""
    return {
        "suite": suite,
        "rounds": rounds,
        "quick": quick,
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "peers_versions": dict(peers),
        "rows": [_row(result) for result in results],
    }


def _row(result: Measured) -> dict[str, Any]:
    row = result.row
    verdicts = [(claim, claim.judge(result.values, result.missing)) for claim in row.claims]
    return {
        "name": row.name,
        "work": row.work,
        "workers": row.workers,
        "values": result.values,
        "processor": result.processor,
        "missing": result.missing,
        "others": result.others,
        "claims": [
            {**asdict(verdict), "demand": claim.demand, "shown": _shown(claim, verdict)} for claim, verdict in verdicts
        ],
    }


def machine() -> dict[str, Any]:
    """What the numbers depend on: processor, cores in use, memory, kernel, and how busy the machine is."""
    return {
        "processor": _first_line_with("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "cores_of_machine": os.cpu_count(),
        "memory": _first_line_with("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "load_average": list(os.getloadavg()),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that were compared, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _first_line_with(path: str, key: str) -> str:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")
