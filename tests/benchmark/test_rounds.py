"""Contenders take turns, and each of them is measured as often as the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from libai_data.benchmark.rounds import Contender, Measure, Row, measure
from tests.benchmark.fake_rows import contender, row


def test_contenders_are_measured_in_turn_between_opening_and_closing() -> None:
    journal: list[str] = []
    measured = measure(row(journal), rounds=3, step=lambda name: None, settle=0)
    assert journal == ["open ours", "open theirs", *["ours", "theirs"] * 3, "close theirs", "close ours"]
    assert measured.values == {"ours": [1.0, 2.0, 1.0], "theirs": [4.0, 4.0, 4.0]}


def test_a_contender_that_is_not_installed_is_left_out_with_its_reason() -> None:
    measured = measure(row([]), rounds=1, step=lambda name: None, settle=0)
    assert measured.missing == {"absent": "not installed"}
    assert "absent" not in measured.values


def test_each_measurement_is_reported_as_progress() -> None:
    steps: list[str] = []
    measure(row([]), rounds=2, step=steps.append, settle=0)
    assert steps == ["ours", "theirs"] * 2


def test_each_measurement_says_how_much_of_the_cores_others_took() -> None:
    measured = measure(row([]), rounds=2, step=lambda name: None, settle=0)
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
