"""Claims: what a row's measurements must show, and whether they do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Values = Mapping[str, Sequence[float]]
"""Contender -> one value a round."""


@dataclass(frozen=True)
class Verdict:
    """What came of a claim.

    Args:
        subject: what was measured.
        value: median over the rounds of the ratio, or of the value itself; None if it was not measured.
        spread: the least and the greatest of the rounds.
        met: whether the median keeps the claim; None if it was not measured, or if nothing is demanded.
        reason: why it was not measured.
    """

    subject: str
    value: float | None = None
    spread: tuple[float, float] = (0.0, 0.0)
    met: bool | None = None
    reason: str = ""


@dataclass(frozen=True)
class AtLeast:
    """A contender is this many times as fast as another, compared round by round.

    Args:
        contender: the faster one.
        than: the slower one.
        factor: by how much; None only shows the ratio.
    """

    contender: str
    than: str
    factor: float | None = None

    @property
    def demand(self) -> str:
        """The floor, in words."""
        return "" if self.factor is None else f">= {self.factor:g} x"

    def judge(self, values: Values, missing: Mapping[str, str]) -> Verdict:
        """Compare the median of the rounds' ratios with the floor."""
        for name in (self.contender, self.than):
            if name in missing:
                return Verdict(f"{self.contender} / {self.than}", reason=missing[name])
        ratios = [theirs / ours for ours, theirs in zip(values[self.contender], values[self.than])]
        met = None if self.factor is None else median(ratios) >= self.factor
        return _verdict(f"{self.contender} / {self.than}", ratios, met)

    def show(self, value: float) -> str:
        """A ratio, as text."""
        return f"{value:.2f} x"


@dataclass(frozen=True)
class AtMost:
    """A contender's value stays below a limit.

    Args:
        contender: whose value.
        limit: in `unit`.
        unit: of the values.
    """

    contender: str
    limit: float
    unit: str

    @property
    def demand(self) -> str:
        """The limit, in words."""
        return f"<= {self.limit:g} {self.unit}"

    def judge(self, values: Values, missing: Mapping[str, str]) -> Verdict:
        """Compare the median of the rounds with the limit."""
        if self.contender in missing:
            return Verdict(self.contender, reason=missing[self.contender])
        rounds = list(values[self.contender])
        return _verdict(self.contender, rounds, median(rounds) <= self.limit)

    def show(self, value: float) -> str:
        """A value with its unit, as text."""
        return f"{value:.3g} {self.unit}"


def _verdict(subject: str, rounds: list[float], met: bool | None) -> Verdict:
    return Verdict(subject, median(rounds), (min(rounds), max(rounds)), met)
