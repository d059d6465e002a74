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


def test_a_contender_that_is_not_installed_is_left_out_with_its_reason() -> None:
    measured = measure(row([]), rounds=1, step=lambda name: None, settle=0)
    assert measured.missing == {"absent": "not installed"}
    assert "absent" not in measured.values


def test_each_measurement_is_reported_with_how_much_of_the_cores_others_took() -> None:
    steps: list[str] = []
    measured = measure(row([]), rounds=2, step=steps.append, settle=0)
    assert steps == ["ours", "theirs"] * 2
    assert len(measured.others) == 4
    assert all(0 <= share <= 1 for share in measured.others)


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


@pytest.mark.parametrize("claim", [AtLeast("ours", "theirs", 2), AtLeast("theirs", "ours", 2), AtMost("ours", 1, "s")])
def test_what_could_not_be_measured_is_neither_met_nor_missed(claim: AtLeast | AtMost) -> None:
    verdict = claim.judge({"theirs": [1.0]}, {"ours": "not installed"})
    assert (verdict.value, verdict.met, verdict.reason) == (None, None, "not installed")


def test_demands_and_values_are_shown_with_their_units() -> None:
    assert AtLeast("ours", "theirs", 1.2).demand == ">= 1.2 x"
    assert AtLeast("ours", "theirs").show(7) == "7.00 x"
    assert AtMost("ours", 60, "MB").demand == "<= 60 MB"
    assert AtMost("ours", 60, "MB").show(18.76) == "18.8 MB"
