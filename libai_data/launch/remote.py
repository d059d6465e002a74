"""One node's launcher on another machine: an ssh process, spoken to through its stdin. See `node.py` for the words."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from libai_data.launch.hostfile import Host
from libai_data.launch.parent_pipe import die_with_main_thread

NODE_PROGRAM = "libai_data.launch.node"
TAKEN_ALONG = ("ONEFLOW_", "LIBAI_DATA_", "NCCL_", "CUDA_", "OMP_")
TAKEN_ALONG_WHOLE = ("PYTHONPATH", "LD_LIBRARY_PATH")
SSH_OPTIONS = {
    # Keys only: nobody is there to type a password on every machine.
    "BatchMode": "yes",
    "ConnectTimeout": "10",
    # A machine that does not answer for 15 to 20 s is gone.
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    # A connection of its own, which ends with this process.
    "ControlMaster": "no",
    "ControlPath": "none",
}


def ssh_command(ssh: str, host: Host, *remote: str) -> list[str]:
    """The command line that runs `remote` on a host. What the user's own ssh command sets comes first, and holds."""
    options = [word for name, value in SSH_OPTIONS.items() for word in ("-o", f"{name}={value}")]
    return [*shlex.split(ssh), "-T", *options, host.target, " ".join(map(shlex.quote, remote))]


def taken_along(environment: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The variables that ranks on other machines get as they are here."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(TAKEN_ALONG) or name in TAKEN_ALONG_WHOLE or name in names
    }


class RemoteNode:
    """The launcher of one node.

    Args:
        host: where it runs, in the same folder as this process and by the same interpreter.
        ssh: the user's ssh command.
        order: its first line.
    """

    def __init__(self, host: Host, ssh: str, order: Mapping[str, Any]) -> None:
        self.host = host
        self.name = host.target
        program = [sys.executable, "-m", NODE_PROGRAM]
        if "PYTHONPATH" in os.environ:
            program = ["env", f"PYTHONPATH={os.environ['PYTHONPATH']}", *program]
        where, what = (" ".join(map(shlex.quote, words)) for words in (["cd", os.getcwd()], ["exec", *program]))
        self.process = subprocess.Popen(
            [*ssh_command(ssh, host)[:-1], f"{where} && {what}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(die_with_main_thread, os.getpid()),
        )
        assert self.process.stdin is not None and self.process.stdout is not None  # they were asked for
        self._stdin = self.process.stdin.fileno()
        self.output = os.dup(self.process.stdout.fileno())
        self.process.stdout.close()
        self.tell(json.dumps(order))
        os.set_blocking(self._stdin, False)

    def tell(self, word: str) -> None:
        """Say a word to the launcher there, if it still listens."""
        with suppress(OSError):
            os.write(self._stdin, f"{word}\n".encode())

    def close(self) -> None:
        """End ssh; the launcher there notices, and ends too."""
        self.process.kill()
        self.process.wait()
        with suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
