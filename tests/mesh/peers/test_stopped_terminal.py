"""Ranks that write to a terminal themselves end although the terminal is stopped (Ctrl-S)."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from libai_data.launch.job_environment import SECONDS_TO_JOIN_VARIABLE
from libai_data.launch.ports import free_port
from tests.distributed.processes import ranks_environment
from tests.properties import slowly


class Terminal:
    """A terminal that nobody reads, and the ranks that write to it."""

    def __init__(self) -> None:
        self._ours, self.side = pty.openpty()
        self._port = free_port()
        self.ranks: list[subprocess.Popen[bytes]] = []

    def start(self, rank: int, code: str, seconds: str = "600") -> subprocess.Popen[bytes]:
        """Start a rank of two, which waits so long for the other one."""
        place = {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port), SECONDS_TO_JOIN_VARIABLE: seconds}
        environment = ranks_environment({**place, **job})
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": self.side, "stderr": self.side}
        self.ranks.append(subprocess.Popen([sys.executable, "-c", code], env=environment, **streams))
        return self.ranks[-1]

    def shown(self) -> str:
        return os.read(self._ours, 1 << 16).decode(errors="replace")

    def stop(self) -> None:
        termios.tcflow(self.side, termios.TCOOFF)

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()
        os.close(self.side)
        os.close(self._ours)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


def test_a_rank_that_waits_for_others_in_its_import_ends(terminal: Terminal) -> None:
    terminal.stop()
    rank = terminal.start(0, "import libai_data, oneflow", "1")
    assert rank.wait() == -signal.SIGKILL


@pytest.mark.parametrize("writes", [False, slowly(True)])
def test_a_rank_whose_peer_is_killed_ends(writes: bool, terminal: Terminal, tmp_path: Path) -> None:
    code = f"""
import os, time
from pathlib import Path
from typing import Any
import libai_data, oneflow
libai_data.synchronize()
Path({str(tmp_path)!r}, os.environ["RANK"]).touch()
while os.environ["RANK"] == "1":
    time.sleep(1)
while {writes}:
    print("a line", flush=True)
libai_data.synchronize()
"""
    ranks = [terminal.start(rank, code) for rank in range(2)]
    while len(list(tmp_path.iterdir())) < 2:
        assert [rank.poll() for rank in ranks] == [None, None], terminal.shown()
        time.sleep(0.01)
    terminal.stop()
    ranks[1].kill()
    assert (ranks[0].wait(), ranks[1].wait()) == (1, -signal.SIGKILL)
