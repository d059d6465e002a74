"""Reports of the ranks, findings of the checks, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from libai_data.commands.console import with_ruled_head

OK, WARNING, RED = "ok", "warning", "RED"

Facts = dict[str, Any]
"""Results of a check on one rank, as JSON values."""


class Finding(NamedTuple):
    """A line of the table."""

    state: str  # OK, WARNING or RED
    found: str  # what the check found
    advice: str = ""  # what the user should do; "" if nothing


class Reports(NamedTuple):
    """The reports of all ranks: rank -> check -> its facts. Ranks that did not report are missing."""

    world_size: int
    of_rank: Mapping[int, Mapping[str, Facts]]

    def facts(self, check: str) -> dict[int, Facts]:
        """The facts of one check: rank -> facts. Ranks without facts are left out."""
        return {rank: report[check] for rank, report in sorted(self.of_rank.items()) if report.get(check)}

    @property
    def num_nodes(self) -> int:
        """The number of nodes; each has one local rank 0."""
        return max(1, sum(each["local_rank"] == 0 for each in self.facts("place").values()))


def table(lines: Sequence[Sequence[Any]]) -> list[str]:
    """The findings as a table, and the advice below the table."""
    rows = [("check", "", "found"), *((check, finding.state, finding.found) for check, finding in lines)]
    advice = [f"{finding.state} {check}: {finding.advice}" for check, finding in lines if finding.advice]
    return [*with_ruled_head(rows), *([""] if advice else []), *advice]
