"""The report: every raw number, with what is needed to judge it, as JSON."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from libai_data.benchmark.rounds import Measured

PACKAGES = ("libai_data", "oneflow", "numpy", "grain", "array_record", "torch")


def report(suite: str, rounds: int, quick: bool, results: Sequence[Measured]) -> dict[str, Any]:
    """All that was measured, as JSON-able data."""
    return {
        "suite": suite,
        "rounds": rounds,
        "quick": quick,
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "rows": [_row(result) for result in results],
    }


def _row(result: Measured) -> dict[str, Any]:
    row = result.row
    verdicts = [claim.judge(result.values, result.missing) for claim in row.claims]
    return {
        "name": row.name,
        "work": row.work,
        "workers": row.workers,
        "values": result.values,
        "missing": result.missing,
        "others": result.others,
        "claims": [{**asdict(verdict), "demand": claim.demand} for verdict, claim in zip(verdicts, row.claims)],
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
