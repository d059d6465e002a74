"""All checks, in the order in which a rank makes them and the table shows them."""

from __future__ import annotations

from typing import Callable, NamedTuple

from libai_data.doctor import (
    clocks,
    limits,
    memory,
    mesh_fit,
    same_config,
    same_dataset,
    same_packages,
    storage,
)
from libai_data.doctor.examined import Examined
from libai_data.doctor.findings import RED, Facts, Finding, Reports
from libai_data.errors import error_text
from libai_data.in_words import numbers_in_words, ranks_by_value

_PROBLEM = "problem"


class Check(NamedTuple):
    """A check.

    Args:
        name: its line in the table.
        examine: what it looks at on one rank.
        judge: what it makes of all ranks' facts.
    """

    name: str
    examine: Callable[[Examined], Facts]
    judge: Callable[[Reports], list[Finding]]


CHECKS = (
    Check(mesh_fit.PLACE, mesh_fit.examine_place, lambda reports: []),
    Check(same_packages.NAME, same_packages.examine, same_packages.judge),
    Check(same_config.NAME, same_config.examine, same_config.judge),
    Check(mesh_fit.NAME, mesh_fit.examine, mesh_fit.judge),
    Check(same_dataset.NAME, same_dataset.examine, same_dataset.judge),
    Check(storage.NAME, storage.examine, storage.judge),
    Check(memory.NAME, memory.examine, memory.judge),
    Check(limits.NAME, limits.examine, limits.judge),
    Check(clocks.NAME, lambda examined: {}, clocks.judge),
)


def examine_all(examined: Examined, about_to: Callable[[str], None]) -> dict[str, Facts]:
    """Make all checks on this rank. What fails is a fact too.

    Args:
        examined: what to look at.
        about_to: told the name of each check before it.
    """
    facts: dict[str, Facts] = {}
    for check in CHECKS:
        about_to(check.name)
        try:
            facts[check.name] = check.examine(examined)
        except Exception as error:  # a user's dataset may raise anything
            facts[check.name] = {_PROBLEM: error_text(error)}
    return facts


def judge_all(reports: Reports) -> list[tuple[str, Finding]]:
    """Judge all ranks' facts; a failure that makes several checks fail is told once."""
    found: list[tuple[str, Finding]] = []
    told: set[str] = set()
    for check in CHECKS:
        told_of = reports.facts(check.name).items()
        problems = ranks_by_value({rank: facts[_PROBLEM] for rank, facts in told_of if _PROBLEM in facts})
        new = {words: ranks for words, ranks in problems.items() if words not in told}
        told.update(new)
        found += [
            (
                check.name,
                Finding(RED, f"fails on rank {numbers_in_words(ranks)}: {words}", "the training would fail so"),
            )
            for words, ranks in new.items()
        ]
        failed = {rank for ranks in problems.values() for rank in ranks}
        sound = {rank: report for rank, report in reports.of_rank.items() if rank not in failed}
        found += [(check.name, finding) for finding in check.judge(Reports(reports.world_size, sound))]
    return found
