"""Which exit code the launcher returns, if several ranks have failed when it looks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadline import wait_until
from tests.distributed.processes import REPOSITORY

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
