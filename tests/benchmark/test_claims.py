"""Claims compare round by round, and a median decides."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.benchmark.claims import AtLeast, AtMost

TIMES = st.floats(1e-6, 1e3)


def test_a_ratio_is_that_of_values_of_the_same_round() -> None:
    verdict = AtLeast("ours", "theirs", 2).judge({"ours": [1.0, 10.0, 2.0], "theirs": [3.0, 30.0, 2.0]}, {})
    assert verdict.value == 3.0
    assert verdict.spread == (1.0, 3.0)
    assert verdict.met is True


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


def test_a_ratio_of_which_nothing_is_demanded_is_only_shown() -> None:
    claim = AtLeast("ours", "theirs")
    assert claim.judge({"ours": [1.0], "theirs": [5.0]}, {}).met is None
    assert claim.demand == ""


@pytest.mark.parametrize("absent", ["ours", "theirs"])
def test_what_could_not_be_measured_is_neither_met_nor_missed(absent: str) -> None:
    verdict = AtLeast("ours", "theirs", 2).judge({}, {absent: "not installed"})
    assert (verdict.value, verdict.met, verdict.reason) == (None, None, "not installed")


def test_a_limit_of_what_could_not_be_measured_is_neither_met_nor_missed() -> None:
    verdict = AtMost("ours", 1, "s").judge({}, {"ours": "not installed"})
    assert (verdict.met, verdict.reason) == (None, "not installed")


def test_demands_and_values_are_shown_with_their_units() -> None:
    assert AtLeast("ours", "theirs", 1.2).demand == ">= 1.2 x"
    assert AtLeast("ours", "theirs").show(7) == "7.00 x"
    assert AtMost("ours", 60, "MB").demand == "<= 60 MB"
    assert AtMost("ours", 60, "MB").show(18.76) == "18.8 MB"
