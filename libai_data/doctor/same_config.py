"""Whether all ranks have loaded the same config."""

from __future__ import annotations

from libai_data.doctor.examined import Examined
from libai_data.doctor.findings import OK, RED, Facts, Finding, Reports
from libai_data.engine.agreement import config_values, differences, hash_of_values

NAME = "config"


def examine(examined: Examined) -> Facts:
    """The config's values by their keys."""
    return {"values": config_values(examined.cfg)}


def judge(reports: Reports) -> list[Finding]:
    """Name the keys that differ."""
    values = {rank: facts["values"] for rank, facts in reports.facts(NAME).items()}
    found = differences(values)
    if found:
        return [Finding(RED, "; ".join(found), "bring the same config files to all nodes, and give the same overrides")]
    return [Finding(OK, f"hash {hash_of_values(each)}") for each in list(values.values())[:1]]
