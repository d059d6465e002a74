"""Each guarantee of the documentation names a test, and the test exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "resume.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
ROWS = [line for line in PAGE.read_text().split("## What is guaranteed")[1].split("##")[0].splitlines() if "|" in line]


@pytest.mark.parametrize("row", ROWS[2:], ids=lambda row: row.split("|")[1].strip()[:40])
def test_a_guarantee_is_shown_by_tests_that_exist(row: str) -> None:
    named = NAMED.findall(row)
    assert named, f"no test is named: {row}"
    for path, name in named:
        assert f"def {name}(" in (REPOSITORY / path).read_text(), f"{path} has no {name}"
