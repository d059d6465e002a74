"""What the checks find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from libai_data.commands.console import with_ruled_head

OK, WARNING, RED = "ok", "warning", "RED"

Facts = dict[str, Any]
"""What a check has seen on one rank; JSON can express it."""


class Finding(NamedTuple):
    """A line of the table."""

    state: str  # OK, WARNING or RED
    found: str  # what was seen
    advice: str = ""  # what to do about it; "" where all is well


class Reports(NamedTuple):
    """What all ranks have told: rank -> check -> its facts; ranks that did not report are missing."""

    world_size: int
    of_rank: Mapping[int, Mapping[str, Facts]]

    def facts(self, check: str) -> dict[int, Facts]:
        """rank -> the facts that a check found there; ranks without facts are left out."""
        return {rank: report[check] for rank, report in sorted(self.of_rank.items()) if report.get(check)}

    @property
    def num_nodes(self) -> int:
        """Nodes: each has one local rank 0."""
        return max(1, sum(each["local_rank"] == 0 for each in self.facts("place").values()))


def table(lines: Sequence[Sequence[Any]]) -> list[str]:
    """The findings as a table, and below it what to do."""
    rows = [("check", "", "found"), *((check, finding.state, finding.found) for check, finding in lines)]
    advice = [f"{finding.state} {check}: {finding.advice}" for check, finding in lines if finding.advice]
    return [*with_ruled_head(rows), *([""] if advice else []), *advice]
