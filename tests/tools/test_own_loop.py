"""The script of docs/own_loop.md: on one rank and on four, whole and resumed in the middle of an epoch."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from libai_data.launch.launcher import free_port
from libai_data.mesh.current import set_mesh
from tests.deadline import run_to_end

SCRIPT = "tools/own_loop.py"


def launched(repository: Path, script: Path, folder: Path) -> str:
    """What the script prints on four ranks."""
    command = [sys.executable, "-m", "libai_data.launch", "--nproc_per_node", "4"]
    command += ["--master_port", str(free_port()), str(script), str(folder)]
    ended = run_to_end(command, 100, cwd=repository)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def steps_and_error(printed: str) -> tuple[int, float]:
    found = re.search(r"after (\d+) steps the mean squared error of 50 samples is (\S+)", printed)
    assert found, printed
    return int(found[1]), float(found[2])


def test_a_loop_of_ones_own_trains_and_resumes_in_the_middle_of_an_epoch(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def result_on_one_rank(script: Path, folder: str) -> tuple[int, float]:
        monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / folder)])
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            set_mesh(None)
        return steps_and_error(capsys.readouterr().out)

    script = repository / SCRIPT
    steps, error = result_on_one_rank(script, "whole")
    assert steps == 52 and 0 < error < 0.5
    shorter = tmp_path / "shorter.py"
    shorter.write_text(
        script.read_text().replace("EPOCHS, SAVE_EVERY = 200, 50, 4, 5", "EPOCHS, SAVE_EVERY = 200, 50, 2, 5")
    )
    # It ends after 26 steps, and saves the 25th, which is the twelfth of the second epoch.
    assert result_on_one_rank(shorter, "resumed")[0] == 26
    assert result_on_one_rank(script, "resumed") == (52, error)
    # Four ranks continue where one rank stopped.
    assert result_on_one_rank(shorter, "four")[0] == 26
    steps, other = steps_and_error(launched(repository, script, tmp_path / "four"))
    assert steps == 52 and abs(other - error) < 1e-3 * error


def test_the_page_shows_the_script_as_it_is(repository: Path) -> None:
    assert (repository / SCRIPT).read_text() in (repository / "docs/own_loop.md").read_text()
    assert len((repository / SCRIPT).read_text().splitlines()) <= 60
