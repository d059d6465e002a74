"""Which exit code the launcher returns, if several ranks or machines have failed when it looks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadline import run_to_end, wait_until
from tests.distributed.processes import REPOSITORY
from tests.properties import slowly

# Each rank ends in its own way, when the launcher cannot look.
ENDS = """
import os, socket, sys, time
folder, rank = os.path.dirname(sys.argv[0]), os.environ["RANK"]
if rank == "0":
    server = socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
open(f"{folder}/{rank}-{os.getpid()}", "w").close()
while not os.path.exists(f"{folder}/go"):
    time.sleep(0.01)
code = int(sys.argv[1 + int(rank)])
os.kill(os.getpid(), -code) if code < 0 else os._exit(code)
"""


def has_ended(process: str) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize(("codes", "found"), [((1, 3), 3), ((1, -9), 137), ((-6, 1), 1), ((1, 0), 1), ((-6, 0), 134)])
def test_ranks_that_end_because_one_is_gone_do_not_hide_its_code(
    codes: tuple[int, int], found: int, tmp_path: Path
) -> None:
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    command = [sys.executable, "-m", "libai_data.launch", "--nproc_per_node", "2", str(script), *map(str, codes)]
    with subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL) as launcher:
        wait_until(lambda: len(list(tmp_path.glob("?-*"))) == 2, "start of the ranks")
        os.kill(launcher.pid, signal.SIGSTOP)
        (tmp_path / "go").touch()
        ranks = [path.name.partition("-")[2] for path in tmp_path.glob("?-*")]
        wait_until(lambda: all(map(has_ended, ranks)), "end of the ranks")
        os.kill(launcher.pid, signal.SIGCONT)
        assert launcher.wait(60) == found


def run_on_machines(a: str, b: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The launcher of two machines, on each of which a shell script is the launcher of the ranks."""
    (folder / "hosts").write_text("a\nb\n")
    (folder / "ssh").write_text(f'read order\ncase " $* " in\n*" a "*)\n{a}\n;;\n*)\n{b}\n;;\nesac\n')
    arguments = ["--hostfile", str(folder / "hosts"), "--ssh", f"bash {folder}/ssh", str(Path(__file__))]
    return run_to_end([sys.executable, "-m", "libai_data.launch", *arguments], 60)


@pytest.mark.parametrize("seconds", [(0.0, 0.2), slowly((0.0, 0.0)), slowly((0.2, 0.0))])
def test_a_machine_that_follows_another_does_not_hide_its_code(seconds: tuple[float, float], tmp_path: Path) -> None:
    line = "libai_data.launch: local rank 1 ended with signal"
    ended = run_on_machines(
        f"sleep {seconds[0]}; echo '{line} SIGABRT; stopping the others'; sleep 0.3; exit 134",
        f"sleep {seconds[1]}; echo '{line} SIGKILL; stopping the others'; echo ended; sleep 0.2; exit 137",
        tmp_path,
    )
    assert ended.returncode == 137
    assert ended.stderr.rstrip().endswith("ended"), ended.stderr


@pytest.mark.parametrize(
    ("says", "code", "is_lost"),
    [
        ("libai_data.launch: local rank 0 ended with exit code 255; stopping the others", 255, False),
        ("libai_data.launch: port 12345 is in use", 1, False),
        ("killed", 255, True),
    ],
)
def test_only_a_machine_whose_ssh_failed_counts_as_lost(says: str, code: int, is_lost: bool, tmp_path: Path) -> None:
    ended = run_on_machines(f"echo '{says}'; seq 100; exit {code}", "read -t 30 word", tmp_path)
    assert ended.returncode == code
    assert ("a cannot be reached, or the ssh connection was lost" in ended.stderr) == is_lost


def test_ranks_that_end_or_wait_without_a_failure_end_no_job_of_several_machines(tmp_path: Path) -> None:
    line = "libai_data.launch: local rank 0-1"
    ended = run_on_machines(
        f"echo '{line} ended with exit code 0, at least 10 s ago; the others still run'; exit 0",
        f"echo \"{line} waits in 'import oneflow' for ranks of the other 1 machine(s)\"; sleep 0.2; read -t 0.1 word\n"
        "while read -t 0.1 word; do echo got $word; done; exit 0",
        tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    assert "got fail" not in ended.stderr
