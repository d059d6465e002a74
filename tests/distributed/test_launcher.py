"""The helper that starts ranks for the tests: it must not hang, and must say what hung."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launcher import launch_ranks
from tests.distributed.processes import LaunchTimeout

# Ranks that use no OneFlow: rank 0 listens, as OneFlow's rank 0 does, so that the launcher starts the others.
LISTEN = """
import os, socket, sys, time
if os.environ["RANK"] == "0":
    server = socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"])))
"""


@pytest.fixture()
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def test_ranks_see_their_arguments_and_environment_and_the_repository(script: Path) -> None:
    script.write_text(
        LISTEN
        + "import libai_data\n"
        + "os.write(1, f\"{os.environ['RANK']} {os.environ['COLOUR']} {sys.argv[1:]}\\n\".encode())\n"
    )
    result = launch_ranks(script, 2, "a", "b c", env={"COLOUR": "red"})
    assert result.returncode == 0, result.output
    assert "0 red ['a', 'b c']" in result.output
    assert "1 red ['a', 'b c']" in result.output


def test_a_rank_that_raises_ends_the_job_with_its_traceback(script: Path) -> None:
    script.write_text(LISTEN + "if os.environ['RANK'] == '1': raise ValueError('culprit')\ntime.sleep(100)\n")
    result = launch_ranks(script, 2, timeout=30)
    assert result.returncode == 1
    assert "rank 1 raised" in result.output
    assert "ValueError: culprit" in result.output


@pytest.mark.slow
def test_ranks_that_hang_print_their_stacks_and_are_killed(script: Path, tmp_path: Path) -> None:
    script.write_text(
        LISTEN
        + f"open(r'{tmp_path}/' + os.environ['RANK'], 'w').write(str(os.getpid()))\n"
        + "def stuck_here():\n    time.sleep(100)\nstuck_here()\n"
    )
    with pytest.raises(LaunchTimeout) as error:
        launch_ranks(script, 2, timeout=8)
    assert str(error.value).count("in stuck_here") == 2
    for rank in "01":
        stat = Path("/proc", (tmp_path / rank).read_text(), "stat")
        assert not stat.exists() or " Z " in stat.read_text(), "the rank still runs"


def test_a_script_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        launch_ranks(tmp_path / "absent.py", 2)
