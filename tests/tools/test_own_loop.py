"""The script of docs/own_loop.md: on one rank and on four, whole and resumed in the middle of an epoch."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any, Callable

import pytest

from libai_data.launch.launcher import free_port
from libai_data.mesh.current import set_mesh
from tests.deadline import run_to_end

SCRIPT = "tools/own_loop.py"


def launched(repository: Path, script: Path, folder: Path) -> str:
    command = [sys.executable, "-m", "libai_data.launch", "--nproc_per_node", "4"]
    command += ["--master_port", str(free_port()), str(script), str(folder)]
    ended = run_to_end(command, 100, cwd=repository)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def steps_and_error(printed: str) -> tuple[int, float]:
    found = re.search(r"after (\d+) steps the mean squared error of 50 samples is (\S+)", printed)
    assert found, printed
    return int(found[1]), float(found[2])


@pytest.fixture
def on_one_rank(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, float]]:
    """Runs the script in this process, if need be for fewer epochs."""

    def run(folder: str, epochs: int = 4) -> tuple[int, float]:
        (tmp_path / folder).mkdir(exist_ok=True)
        script, whole = tmp_path / "script.py", (repository / SCRIPT).read_text()
        script.write_text(
            whole.replace("EPOCHS, SAVE_EVERY = 200, 50, 4, 5", f"EPOCHS, SAVE_EVERY = 200, 50, {epochs}, 5")
        )
        monkeypatch.setattr(sys, "argv", [str(script), "--resume", str(tmp_path / folder)])  # as in a restart
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            set_mesh(None)
        return steps_and_error(capsys.readouterr().out)

    return run


def test_a_loop_of_ones_own_trains_and_resumes_in_the_middle_of_an_epoch(on_one_rank: Any) -> None:
    steps, error = on_one_rank("whole")
    assert steps == 52 and 0 < error < 0.5
    # It ends after 26 steps, and saves the 25th, which is the twelfth of the second epoch.
    assert on_one_rank("resumed", epochs=2)[0] == 26
    assert on_one_rank("resumed") == (52, error)


def test_a_kill_while_the_state_is_written_leaves_the_state_before(
    on_one_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(Exception):
        pass

    write_text = Path.write_text

    def write_half(path: Path, text: str) -> int:
        if path.suffix != ".json":
            return write_text(path, text)
        write_text(path, text[: len(text) // 2])
        raise Killed

    assert on_one_rank("killed", epochs=2)[0] == 26
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Path, "write_text", write_half)
        on_one_rank("killed")
    assert on_one_rank("killed") == on_one_rank("whole")


@pytest.mark.slow
def test_four_ranks_continue_where_one_rank_stopped(on_one_rank: Any, repository: Path, tmp_path: Path) -> None:
    assert on_one_rank("four", epochs=2)[0] == 26
    steps, error = steps_and_error(launched(repository, repository / SCRIPT, tmp_path / "four"))
    assert steps == 52 and abs(error - on_one_rank("whole")[1]) < 1e-3 * error


def test_the_page_shows_the_script_as_it_is(repository: Path) -> None:
    assert (repository / SCRIPT).read_text() in (repository / "docs/own_loop.md").read_text()
    assert len((repository / SCRIPT).read_text().splitlines()) <= 60
