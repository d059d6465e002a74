"""Whether all ranks have the same packages: red where this package needs them, a warning for all others."""

from __future__ import annotations

import importlib.metadata

from libai_data.doctor.examined import Examined
from libai_data.doctor.findings import OK, RED, WARNING, Facts, Finding, Reports
from libai_data.engine.agreement import differences, needed_versions

NAME = "packages"


def examine(examined: Examined) -> Facts:
    """Versions of what is needed, and of all else that is installed."""
    needed = needed_versions()
    # A distribution whose metadata is broken has no name.
    installed = {str(each.metadata["Name"]).lower(): each.version for each in importlib.metadata.distributions()}
    others = {name: version for name, version in installed.items() if name not in {each.lower() for each in needed}}
    return {"needed": needed, "others": others}


def judge(reports: Reports) -> list[Finding]:
    """Name what differs."""
    facts = reports.facts(NAME)
    needed = differences({rank: each["needed"] for rank, each in facts.items()})
    others = differences({rank: each["others"] for rank, each in facts.items()})
    found = []
    if needed:
        found.append(
            Finding(RED, "; ".join(needed), "install the same versions on all nodes, or start them from one image")
        )
    if others:
        found.append(
            Finding(WARNING, "; ".join(others), "harmless unless the dataset or the model uses these packages")
        )
    if found or not facts:
        return found
    first = next(iter(facts.values()))
    words = ", ".join(f"{name} {first['needed'][name]}" for name in ("python", "libai_data", "oneflow", "numpy"))
    return [Finding(OK, f"{words}; {len(first['others'])} others")]
