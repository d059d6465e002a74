"""Rows whose contenders take no time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from tools.benchmarks.rows import AtLeast, AtMost, Contender, Measure, Row, Unavailable


def contender(name: str, values: list[float], journal: list[str]) -> Contender:
    """A contender that gives these values in turn, and writes down what is done with it."""

    @contextmanager
    def opened() -> Iterator[Measure]:
        journal.append(f"open {name}")
        left = itertools.cycle(values)

        def measure() -> float:
            journal.append(name)
            return next(left)

        try:
            yield measure
        finally:
            journal.append(f"close {name}")

    return Contender(name, opened)


def missing(name: str) -> Contender:
    @contextmanager
    def opened() -> Iterator[Measure]:
        raise Unavailable("not installed")
        yield lambda: 0.0

    return Contender(name, opened)


def row(journal: list[str]) -> Row:
    """Ours takes 1 and 2 seconds, theirs 4."""
    contenders = (contender("ours", [1.0, 2.0], journal), contender("theirs", [4.0], journal), missing("absent"))
    claims = (AtLeast("ours", "theirs", 2.5), AtLeast("ours", "absent", 7), AtMost("ours", 1.0, "s"))
    return Row("fake", "sitting still", "0", contenders, claims)
