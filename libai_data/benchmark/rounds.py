"""Rounds: contenders measured in turn, A B C A B C ..., so that what slows the machine down slows all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

from libai_data.benchmark.claims import AtLeast, AtMost
from libai_data.benchmark.disturbance import Onlooker

Measure = Callable[[], float]
"""Measures once; seconds, or whatever the row is about. Less is better."""

_SECONDS_TO_SETTLE = 0.2


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
        missing: contender -> why it could not run.
        others: share of the cores that other processes took, one value a measurement.
    """

    row: Row
    values: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    others: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Args:
        quick: much less work, to see that it runs; the numbers mean little.
        seconds: how long one measurement of throughput lasts.
        folder: for generated data; removed afterwards.
    """

    quick: bool
    seconds: float
    folder: Path


def measure(row: Row, rounds: int, step: Callable[[str], None], settle: float = _SECONDS_TO_SETTLE) -> Measured:
    """Measure a row's contenders in interleaved rounds.

    Args:
        row: what to measure.
        rounds: how often.
        step: told the contender's name after each measurement.
        settle: seconds of rest before each, in which the contender before comes to rest.
    """
    measured = Measured(row)
    with ExitStack() as opened:
        measures = _open(row.contenders, opened, measured)
        for _ in range(rounds):
            for name, take in measures.items():
                time.sleep(settle)
                onlooker = Onlooker()
                measured.values[name].append(take())
                measured.others.append(onlooker.others())
                step(name)
    return measured


def _open(contenders: Sequence[Contender], opened: ExitStack, measured: Measured) -> dict[str, Measure]:
    measures: dict[str, Measure] = {}
    for contender in contenders:
        try:
            measures[contender.name] = opened.enter_context(contender.open())
        except Unavailable as reason:
            measured.missing[contender.name] = str(reason)
        else:
            measured.values[contender.name] = []
    return measures
