"""The command finds its suites, refuses what it does not know, and writes what it measured."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deadline import run_to_end
from tools.benchmark import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "invalid choice"),
        (["loader", "--rounds", "0"], "at least 1"),
        (["loader", "--quick", "--only", "plan-0"], "Did you mean 'plain-0'"),
    ],
)
def test_wrong_arguments_are_refused_with_a_reason(arguments: list[str], said: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err


def test_a_run_gives_the_process_its_cores_back(monkeypatch: Any) -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(SystemExit):
        main(["loader", "--quick", "--only", "nothing", "--cores", "1"])
    assert os.sched_getaffinity(0) == before


def test_the_tool_measures_prints_a_table_writes_json_and_leaves_nothing_else(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(repository / "tools" / "benchmark.py"), "loader", "--quick", "--rounds", "1"]
    result, temporary = tmp_path / "result.json", tmp_path / "temporary"
    temporary.mkdir()
    command += ["--only", "read_batch-0", "--only", "first_batch", "--json", str(result)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = run_to_end(command, 120, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "libai_data / gather" in done.stdout
    found = next(row for row in json.loads(result.read_text())["rows"] if row["name"] == "read_batch-0")
    assert set(found["values"]) == {"libai_data", "gather"}
    assert all(value > 0 for values in found["values"].values() for value in values)
    assert not list(temporary.iterdir()), "the folder that it worked in is left"
