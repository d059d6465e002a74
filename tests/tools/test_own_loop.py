"""The script of docs/own_loop.md: on one rank and on four, whole and resumed in the middle of an epoch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from libai_data.launch.launcher import free_port

SCRIPT = "tools/own_loop.py"


def result_of(repository: Path, script: Path, folder: Path, ranks: int) -> tuple[int, float]:
    """Steps and error that the script prints at its end."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "libai_data.launch", "--nproc_per_node", str(ranks)]
    command += ["--master_port", str(free_port()), str(script), str(folder)]
    ended = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.search(r"after (\d+) steps the mean squared error of 50 samples is (\S+)", ended.stdout + ended.stderr)
    assert found, ended.stdout + ended.stderr
    return int(found[1]), float(found[2])


def test_a_loop_of_ones_own_trains_and_resumes_in_the_middle_of_an_epoch(repository: Path, tmp_path: Path) -> None:
    script = repository / SCRIPT
    steps, error = result_of(repository, script, tmp_path / "whole", ranks=1)
    assert steps == 52 and 0 < error < 0.5
    shorter = tmp_path / "shorter.py"
    shorter.write_text(
        script.read_text().replace("EPOCHS, SAVE_EVERY = 200, 50, 4, 5", "EPOCHS, SAVE_EVERY = 200, 50, 2, 5")
    )
    # It ends after 26 steps, and saves the 25th, which is the twelfth of the second epoch.
    assert result_of(repository, shorter, tmp_path / "resumed", ranks=1)[0] == 26
    for folder, resumed in (("resumed", True), ("on four", False)):
        found, other = result_of(repository, script, tmp_path / folder, ranks=1 if resumed else 4)
        assert found == 52
        assert other == error if resumed else abs(other - error) < 1e-3 * error


def test_the_page_shows_the_script_as_it_is(repository: Path) -> None:
    assert (repository / SCRIPT).read_text() in (repository / "docs/own_loop.md").read_text()
    assert len((repository / SCRIPT).read_text().splitlines()) <= 60
