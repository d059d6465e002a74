"""Contenders take turns; claims compare round by round, and a median decides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.benchmarks.fake_rows import contender, row
from tools.benchmarks.rows import AtLeast, AtMost, Contender, Measure, Row, measure

TIMES = st.floats(1e-6, 1e3)


def test_contenders_are_measured_in_turn_between_opening_and_closing() -> None:
    journal: list[str] = []
    measured = measure(row(journal), rounds=3, step=lambda name: None, settle=0)
    assert journal == ["open ours", "open theirs", *["ours", "theirs"] * 3, "close theirs", "close ours"]
    assert measured.values == {"ours": [1.0, 2.0, 1.0], "theirs": [4.0, 4.0, 4.0]}


def test_contenders_are_closed_when_one_of_them_fails() -> None:
    journal: list[str] = []

    @contextmanager
    def failing() -> Iterator[Measure]:
        raise RuntimeError("out of luck")
        yield lambda: 0.0

    broken = Row("broken", "", "0", (contender("ours", [1.0], journal), Contender("broken", failing)), ())
    with pytest.raises(RuntimeError, match="out of luck"):
        measure(broken, rounds=1, step=lambda name: None, settle=0)
    assert journal[-1] == "close ours"


@given(st.lists(st.tuples(TIMES, TIMES), min_size=1), st.floats(0.1, 10))
def test_a_floor_is_met_when_the_median_ratio_reaches_it(rounds: list, factor: float) -> None:
    values = {"ours": [ours for ours, _ in rounds], "theirs": [theirs for _, theirs in rounds]}
    verdict = AtLeast("ours", "theirs", factor).judge(values, {})
    assert verdict.met == (median(theirs / ours for ours, theirs in rounds) >= factor)
    assert verdict.value is not None
    assert verdict.spread[0] <= verdict.value <= verdict.spread[1]


@given(st.lists(TIMES, min_size=1), TIMES)
def test_a_limit_is_kept_when_the_median_stays_below(rounds: list, limit: float) -> None:
    assert AtMost("ours", limit, "s").judge({"ours": rounds}, {}).met == (median(rounds) <= limit)
