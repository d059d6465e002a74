"""All checks, in the order in which a rank makes them and the table shows them."""

from __future__ import annotations

from typing import Callable, NamedTuple

from libai_data.commands.doctor import resources, sameness
from libai_data.commands.doctor.findings import RED, Facts, Finding, Reports
from libai_data.commands.doctor.rank import Examined
from libai_data.errors import error_text, numbers_in_words, ranks_by_value

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
    Check(sameness.PLACE, sameness.examine_place, lambda reports: []),
    Check(sameness.PACKAGES, sameness.examine_packages, sameness.judge_packages),
    Check(sameness.CONFIG, sameness.examine_config, sameness.judge_config),
    Check(sameness.MESH, sameness.examine_mesh, sameness.judge_mesh),
    Check(sameness.DATASET, sameness.examine_dataset, sameness.judge_dataset),
    Check(sameness.STORAGE, sameness.examine_storage, sameness.judge_storage),
    Check(resources.MEMORY, resources.examine_memory, resources.judge_memory),
    Check(resources.LIMITS, resources.examine_limits, resources.judge_limits),
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
