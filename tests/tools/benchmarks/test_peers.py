"""Peers run in an environment of their own; one that is not installed, or fails, is reported."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deadline import run_to_end
from tests.tools.benchmarks.fake_rows import contender as fake_contender
from tools.benchmarks.chart import described, table, write_into
from tools.benchmarks.peer_loaders import PEERS
from tools.benchmarks.peer_process import PeerError, PeerProcess
from tools.benchmarks.peers import peer
from tools.benchmarks.results import table as results_table
from tools.benchmarks.rows import AtLeast, Row, Scale, Unavailable, measure
from tools.benchmarks.samples import FIELDS, GPT, PLAIN
from tools.benchmarks.timing import BATCH
from tools.benchmarks.works import write_tokens

GOOD = {name: [[BATCH, *shape], dtype] for name, (shape, dtype) in FIELDS[PLAIN].items()}


def fake_python(folder: Path, first: str, answer: str = "") -> str:
    """A program that writes these lines: at once, and for each measurement."""
    program = folder / "python"
    lines = ["#!/bin/sh", "touch $TMPDIR/kept", "echo says this >&2", f"echo '{first}'"]
    program.write_text("\n".join([*lines, f"while read line; do echo '{answer}'; done\n"]))
    program.chmod(0o755)
    return str(program)


def test_a_peer_that_is_not_installed_is_reported(tmp_path: Path) -> None:
    write_tokens(tmp_path / PLAIN, 64)
    with pytest.raises(Unavailable, match="spdl is not installed"):
        PeerProcess(sys.executable, "spdl", PLAIN, tmp_path)


def test_a_peer_is_measured_by_its_own_process_which_ends_with_it(tmp_path: Path) -> None:
    cost = json.dumps({"seconds": 0.25, "processor": 0.5})
    with PeerProcess(fake_python(tmp_path, json.dumps({"batch": GOOD}), cost), "torch", PLAIN, tmp_path) as process:
        found = process.measure(0.0)
    assert (found, found.processor) == (0.25, 0.5)
    assert (tmp_path / "kept").exists()  # Temporary files of a peer go with the folder of the run.
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


@pytest.mark.parametrize(
    ("first", "work", "said"),
    [
        (json.dumps({"batch": GOOD}), GPT, r"yields .*position_ids.*, not"),
        (json.dumps({"failed": "Traceback of it"}), PLAIN, r"(?s)Traceback of it.*says this"),
        ("what is no JSON", PLAIN, r"(?s)what is no JSON.*says this"),
    ],
)
def test_a_peer_that_fails_or_reads_other_samples_is_refused(first: str, work: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=said):
        PeerProcess(fake_python(tmp_path, first), "torch", work, tmp_path)


def test_a_peer_that_dies_is_refused_with_what_it_wrote(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho says this >&2\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(PeerError, match=r"(?s)ended with 3.*says this"):
        PeerProcess(str(program), "torch", PLAIN, tmp_path)


def test_a_peer_that_fails_in_a_later_round_does_not_end_the_others(tmp_path: Path) -> None:
    program = Path(fake_python(tmp_path, json.dumps({"batch": GOOD})))
    cost = json.dumps({"seconds": 0.25, "processor": 0.5})
    program.write_text(program.read_text().replace("echo ''", f"echo '{cost}'; read line; exit 3"))
    contenders = (peer("torch", PLAIN, Scale(True, 0.0, tmp_path, str(program))), fake_contender("other", [1.0], []))
    row = Row("fake", "", "2", contenders, (AtLeast("other", "torch"),))
    measured = measure(row, 3, lambda name: None, settle=0)
    assert measured.missing == {"torch": "failed"} and not measured.processor
    assert measured.values == {"other": [1.0, 1.0, 1.0]}
    assert "failed" in results_table([measured])


RESULT: dict[str, Any] = {
    "suite": "peers",
    "rounds": 2,
    "quick": False,
    "finished": "2024-01-02T03:04:05+00:00",
    "machine": {"cores": 2, "processor": "Quick 9"},
    "versions": {"python": "3.10.1", "libai_data": "1.2"},
    "peers_versions": {"python": "3.11.2", "spdl": "0.8"},
    "rows": [
        {
            "name": "plain",
            "values": {"libai_data": [0.001, 0.002], "raw": [0.002, 0.002], "spdl": [0.003, 0.004]},
            "processor": {"libai_data": [0.004, 0.004]},
            "missing": {"torch": "torch is not installed: No module named 'torch'"},
            "others": [0.25],
        }
    ],
}


def test_the_table_has_every_loader_with_its_version_time_and_ratio() -> None:
    lines = table(RESULT).splitlines()
    assert len(lines) == 2 + 2 + len(PEERS) + 1
    assert lines[2] == "| libai_data | 1.2 | 1.5 ms (4) |"
    assert "| SPDL | 0.8 | 3.5 ms, 2.5 x |" in lines
    assert "| PyTorch `DataLoader` |  | torch is not installed |" in lines
    assert lines[-1] == "| *limit* |  | 2 ms, 1.5 x, raw copies |"
    assert "2 round(s), 2 cores (Quick 9)" in described(RESULT)
    assert "Other programs used 25 % of the cores" in described(RESULT)


@pytest.mark.parametrize("suite", ["peers", "loader", "training"])
def test_a_later_run_replaces_the_table_of_the_page(suite: str, tmp_path: Path, repository: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text((repository / "docs" / "benchmarks.md").read_text("utf-8"), "utf-8")
    write_into(page, suite, "first")
    before = page.read_text("utf-8")
    write_into(page, suite, "second")
    assert before.count("\nfirst\n") == 1 and page.read_text("utf-8") == before.replace("\nfirst\n", "\nsecond\n")
    with pytest.raises(ValueError, match="has no line"):
        write_into(Path(__file__), suite, "third")


@pytest.mark.slow
def test_the_command_measures_what_is_installed_and_names_what_is_not(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(repository / "tools" / "benchmark.py"), "peers", "--quick", "--rounds", "1"]
    result = tmp_path / "result.json"
    command += ["--only", "plain", "--json", str(result), "--peers-python", sys.executable]
    done = run_to_end(command, 400, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    content = json.loads(result.read_text())
    (row,) = content["rows"]
    assert {*row["values"], *row["missing"]} == {"libai_data", "raw", "oneflow", *PEERS}
    assert {"spdl", "streaming"} <= set(row["missing"])
    assert all(values[0] > 0 for kind in ("values", "processor") for values in row[kind].values())
    assert "is not installed" in done.stdout and "is not installed" in table(content)
