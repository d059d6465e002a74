"""The report of a conformance check: a table with a line for each promise."""

from __future__ import annotations

from dataclasses import dataclass

from libai_data.commands.console import aligned
from libai_data.errors import ContractError

CHECKS: dict[str, str] = {
    "once": "every index once an epoch",
    "steps": "equal steps on all ranks",
    "world": "same stream on other world sizes",
    "state": "state restored at every step",
    "elastic": "state restored on other world sizes",
    "workers": "same stream with other worker counts",
    "epochs": "epochs whole after a resume",
}
"""Name of each check -> the promise that it checks."""


@dataclass(frozen=True)
class Finding:
    """What came of one check.

    Args:
        check: its name, a key of `CHECKS`.
        cases: how many cases were tried; 0 if it does not apply.
        failed: how many of them failed.
        detail: the first failure, or why nothing was tried.
    """

    check: str
    cases: int
    failed: int
    detail: str

    @property
    def verdict(self) -> str:
        """ "kept", "BROKEN" or "not checked"."""
        if not self.cases:
            return "not checked"
        return "BROKEN" if self.failed else "kept"


@dataclass(frozen=True)
class Report:
    """What came of all checks, in the order of `CHECKS`.

    Args:
        title: what was checked.
        findings: one for each check.
    """

    title: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether no promise was found broken."""
        return not self.broken

    @property
    def broken(self) -> list[str]:
        """Names of the checks that failed."""
        return [finding.check for finding in self.findings if finding.failed]

    def __str__(self) -> str:
        """The table as text."""
        lines = aligned([("promise", "verdict", "cases", "first failure"), *self._rows()])
        return "\n".join([self.title, "", lines[0], "-" * len(lines[0]), *lines[1:]])

    def markdown(self) -> str:
        """The table in Markdown."""
        rows = [("promise", "verdict", "cases", "first failure"), ("---",) * 4, *self._rows()]
        return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)

    def raise_if_broken(self) -> None:
        """Raise with the table, if a promise is broken.

        Raises:
            ContractError: One is.
        """
        if not self.passed:
            raise ContractError(f"the loader breaks {len(self.broken)} promise(s):\n{self}")

    def _rows(self) -> list[tuple[str, str, str, str]]:
        return [
            (
                CHECKS[finding.check],
                finding.verdict,
                f"{finding.failed} of {finding.cases}" if finding.failed else str(finding.cases),
                finding.detail,
            )
            for finding in self.findings
        ]
