"""Two nodes on one machine: network namespaces joined by a pair of virtual cards.

The namespaces have no names: each lives as long as a process that holds it, which ends with the tests, however they
end.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.deadline import Deadline

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl


@dataclass(frozen=True)
class Node:
    """A network namespace."""

    address: str  # of its card
    holder: int  # process id of the process that keeps it

    def command(self, *words: str) -> list[str]:
        """A command line that runs in this namespace."""
        return ["nsenter", "--target", str(self.holder), "--net", "--", *words]

    def run(self, *words: str) -> None:
        """Run a command in this namespace."""
        subprocess.run(self.command(*words), check=True, capture_output=True)


def why_not() -> str | None:
    """Why this machine cannot be two nodes; None if it can."""
    if os.geteuid() != 0:
        return "two nodes on one machine need root, to make network namespaces"
    for program in ("ip", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"two nodes on one machine need the program '{program}' (Debian: iproute2, util-linux)"
    tried = subprocess.run(["unshare", "--net", "ip", "link", "set", "lo", "up"], capture_output=True, text=True)
    if tried.returncode:
        return f"this machine allows no network namespaces: {tried.stderr.strip()}"
    return None


@contextmanager
def two_nodes() -> Iterator[list[Node]]:
    """Make two nodes that reach each other, and nothing else."""
    holders = [
        subprocess.Popen(["unshare", "--net", "sleep", "infinity"], preexec_fn=_end_with_parent) for _ in ADDRESSES
    ]
    try:
        nodes = [Node(address, holder.pid) for address, holder in zip(ADDRESSES, holders)]
        for node in nodes:
            _wait_for_namespace(node.holder)
        link = ["ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth0", "netns"]
        nodes[0].run(*link, str(nodes[1].holder))
        for node in nodes:
            node.run("ip", "address", "add", f"{node.address}/24", "dev", "veth0")
            node.run("ip", "link", "set", "veth0", "up")
            node.run("ip", "link", "set", "lo", "up")
        yield nodes
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def _end_with_parent() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for_namespace(pid: int) -> None:
    deadline = Deadline(10)
    while os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        if deadline.has_passed:
            raise TimeoutError(f"process {pid} has made no network namespace")
        time.sleep(0.005)
