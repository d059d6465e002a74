"""Rows: contenders measured in turn, A B C A B C ..., and claims that their values must keep.

What slows the machine down so slows all contenders of a row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Callable

from tools.benchmarks.processes import Onlooker, wait_for_rest
from tools.benchmarks.timing import Cost

Measure = Callable[[], float]
"""Measures once; seconds, or whatever the row is about. Less is better."""

_LONGEST_REST = 30.0


class Unavailable(Exception):
    """A contender cannot run here; the message says why."""


@dataclass(frozen=True)
class Contender:
    """Something to measure.

    Args:
        name: within its row.
        open: prepares it, and gives a `Measure` for as long as the context lasts; raises `Unavailable` when something
            that it needs is not installed.
    """

    name: str
    open: Callable[[], AbstractContextManager[Measure]]


def contender(name: str, measure: Measure, prepare: Callable[[], object] = lambda: None) -> Contender:
    """A contender with nothing to close; `prepare` is called when it is opened."""

    @contextmanager
    def opened() -> Iterator[Measure]:
        prepare()
        yield measure

    return Contender(name, opened)


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
        limit: in `unit`; None only shows the value.
        unit: of the values.
    """

    contender: str
    limit: float | None
    unit: str

    @property
    def demand(self) -> str:
        """The limit, in words."""
        return "" if self.limit is None else f"<= {self.limit:g} {self.unit}"

    def judge(self, values: Values, missing: Mapping[str, str]) -> Verdict:
        """Compare the median of the rounds with the limit."""
        if self.contender in missing:
            return Verdict(self.contender, reason=missing[self.contender])
        rounds = list(values[self.contender])
        return _verdict(self.contender, rounds, None if self.limit is None else median(rounds) <= self.limit)

    def show(self, value: float) -> str:
        """A value with its unit, as text."""
        return f"{value:.3g} {self.unit}" if abs(value) < 1000 else f"{value:,.0f} {self.unit}"


def _verdict(subject: str, rounds: list[float], met: bool | None) -> Verdict:
    return Verdict(subject, median(rounds), (min(rounds), max(rounds)), met)


@dataclass(frozen=True)
class Row:
    """One line of what is promised.

    Args:
        name: short, for `--only`.
        work: what is done, in words.
        workers: worker processes, in words.
        contenders: measured in this order in each round.
        claims: what the measurements must show.
    """

    name: str
    work: str
    workers: str
    contenders: tuple[Contender, ...]
    claims: tuple[AtLeast | AtMost, ...]


@dataclass
class Measured:
    """What was measured for a row.

    Args:
        row: the row.
        values: contender -> one value a round.
        processor: contender -> seconds of processor time, one value a round, if it counts them.
        missing: contender -> why it could not run.
        others: share of the cores that other processes took, one value a measurement.
    """

    row: Row
    values: dict[str, list[float]] = field(default_factory=dict)
    processor: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    others: list[float] = field(default_factory=list)

    def give_up(self, name: str, reason: str) -> None:
        """Count a contender as missing, whatever was measured of it before."""
        self.missing[name] = reason
        self.values.pop(name, None)
        self.processor.pop(name, None)


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Args:
        quick: much less work, to see that it runs; the numbers mean little.
        seconds: how long one measurement of throughput lasts.
        folder: for generated data; removed afterwards.
        peers_python: interpreter of the environment that has the peers' packages.
    """

    quick: bool
    seconds: float
    folder: Path
    peers_python: str = sys.executable


def measure(row: Row, rounds: int, step: Callable[[str], None], settle: float = _LONGEST_REST) -> Measured:
    """Measure a row's contenders in interleaved rounds.

    Args:
        row: what to measure.
        rounds: how often.
        step: told the contender's name after each measurement.
        settle: the most seconds to wait before each, until the other contenders are at rest.
    """
    measured = Measured(row)
    with ExitStack() as opened:
        measures = _open(row.contenders, opened, measured)
        for _ in range(rounds):
            for name, take in list(measures.items()):
                wait_for_rest(settle)
                onlooker = Onlooker()
                try:
                    taken = take()
                except Unavailable as reason:
                    measured.give_up(name, str(reason))
                    del measures[name]
                    continue
                measured.values[name].append(float(taken))
                if isinstance(taken, Cost):
                    measured.processor.setdefault(name, []).append(taken.processor)
                measured.others.append(onlooker.others())
                step(name)
    return measured


def _open(contenders: Sequence[Contender], opened: ExitStack, measured: Measured) -> dict[str, Measure]:
    measures: dict[str, Measure] = {}
    for contender in contenders:
        try:
            measures[contender.name] = opened.enter_context(contender.open())
        except Unavailable as reason:
            measured.give_up(contender.name, str(reason))
        else:
            measured.values[contender.name] = []
    return measures
