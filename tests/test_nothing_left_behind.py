"""What conftest.py does about tests that leave processes or shared memory behind, or end their process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import deadline
from tests.deadline import Deadline, run_to_end
from tests.properties import slowly

CONFTEST = Path(__file__).with_name("conftest.py")


@pytest.fixture()
def session(tmp_path: Path) -> Path:
    """A folder with conftest.py, whose tests wait only a moment for what they left to end."""
    (tmp_path / "tests").mkdir()
    shutil.copy(deadline.__file__, tmp_path / "tests")
    text = CONFTEST.read_text()
    assert "ENDING_SECONDS = 30.0" in text
    (tmp_path / "conftest.py").write_text(text.replace("ENDING_SECONDS = 30.0", "ENDING_SECONDS = 0.3"))
    return tmp_path


def run(session: Path, test: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (session / "test_it.py").write_text(f"import os, subprocess, sys, time\ndef test_it():\n    {test}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, str(session)]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # Plugins take longer to import than these tests.
    return run_to_end(command, cwd=session, env=env)


def test_a_session_fails_when_a_process_outlives_its_parent(session: Path) -> None:
    result = run(
        session,
        "subprocess.run(['sh', '-c', 'sleep 1000 >/dev/null 2>&1 & echo $! > pid'], start_new_session=True)",
    )
    os.kill(int((session / "pid").read_text()), signal.SIGKILL)
    assert result.returncode == 1
    assert "The tests left behind" in result.stdout
    assert "sleep 1000" in result.stdout


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="this machine has no /dev/shm")
def test_a_session_fails_when_shared_memory_is_left(session: Path) -> None:
    name = f"/dev/shm/left_by_{os.getpid()}"
    result = run(session, f"open({name!r}, 'w').close()")
    os.unlink(name)
    assert result.returncode == 1
    assert name in result.stdout


def test_a_test_that_ends_its_process_is_not_run_again_but_the_others_are(session: Path) -> None:
    result = run(session, "os._exit(3)\ndef test_another():\n    pass", "-p", "xdist", "-n", "2")
    assert result.returncode == 1
    assert "1 failed, 1 passed" in result.stdout and "test_it.py::test_it" in result.stdout, result.stdout


WRITER = "while mkdir -p $TMPDIR/late; do touch ready; sleep 0.01; done"


@pytest.mark.parametrize("workers", ["", slowly("-p xdist -n 1")])
def test_ctrl_c_leaves_no_folder_though_a_test_started_a_process_that_goes_on(session: Path, workers: str) -> None:
    """Ctrl-C reaches the group of pytest, and not what a test started in a session of its own."""
    # On a busy machine, a moment may be too short for the first kill.
    (session / "conftest.py").write_text(CONFTEST.read_text())
    (session / "test_it.py").write_text(
        "import subprocess, time\n"
        f"def test_it():\n    subprocess.Popen(['sh', '-c', {WRITER!r}], start_new_session=True)\n    time.sleep(100)\n"
    )
    folder = session / "temporary"
    folder.mkdir()
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers.split(), "test_it.py"]
    with subprocess.Popen(command, cwd=session, env=env, start_new_session=True, stdout=subprocess.DEVNULL) as process:
        patience = Deadline(60.0)
        while not (session / "ready").exists():
            assert process.poll() is None and not patience.has_passed
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert not list(folder.iterdir())
