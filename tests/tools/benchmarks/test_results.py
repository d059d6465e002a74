"""The table tells met from missed from not measured; the report keeps every number."""

from __future__ import annotations

import json

from tests.tools.benchmarks.fake_rows import row
from tools.benchmarks.results import report, table
from tools.benchmarks.rows import Measured, measure


def fake(rounds: int = 2) -> Measured:
    return measure(row([]), rounds=rounds, step=lambda name: None, settle=0)


def test_each_claim_has_its_line_with_median_spread_demand_and_verdict() -> None:
    lines = table([fake()]).splitlines()
    assert " ".join(lines[2].split()) == "fake sitting still 0 ours / theirs 3.00 x 2.00 x .. 4.00 x >= 2.5 x yes"
    assert " ".join(lines[3].split()) == "ours / absent - not installed >= 7 x"
    assert " ".join(lines[4].split()) == "ours 1.5 s 1 s .. 2 s <= 1 s NO"


def test_a_busy_machine_is_reported_and_a_quiet_one_is_not() -> None:
    result = fake()
    result.others = [0.0, 0.5, 0.6, 0.7]
    assert "Other processes took 55 % of the cores" in table([result])
    result.others = [0.0, 0.01, 0.9]
    assert "Other processes" not in table([result])


def test_the_report_is_json_with_every_number_the_versions_and_the_machine() -> None:
    found = json.loads(json.dumps(report("fake", 2, True, [fake()], {"python": "3.11"})))
    assert found["rows"][0]["values"] == {"ours": [1.0, 2.0], "theirs": [4.0, 4.0]}
    assert found["rows"][0]["missing"] == {"absent": "not installed"}
    assert [claim["met"] for claim in found["rows"][0]["claims"]] == [True, None, False]
    assert found["rows"][0]["claims"][0]["demand"] == ">= 2.5 x"
    assert found["versions"]["oneflow"].startswith("0.9")
    assert found["machine"]["cores"] >= 1
    assert found["quick"] is True
