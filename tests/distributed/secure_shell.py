"""A real sshd in each network namespace of a test, with keys, users' files and configurations of its own.

Nothing of the machine's own ssh is read or used, and nobody outside the namespaces can reach these.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.deadline import Deadline
from tests.distributed.namespaces import Node, _end_with_parent

SSHD = shutil.which("sshd", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))
# Where sshd changes its root to while nobody has logged in; compiled in.
PRIVILEGE_SEPARATION = Path("/run/sshd")
SERVER = """
ListenAddress {address}:22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
LogLevel ERROR
"""
CLIENT = """
Host *
    User root
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    LogLevel ERROR
"""


def why_no_sshd() -> str | None:
    """Why this machine cannot run an sshd for a test; None if it can. For root alone."""
    if SSHD is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        return "launching over ssh needs sshd, ssh and ssh-keygen (Debian: openssh-server, openssh-client)"
    return None


@contextmanager
def reachable_by_ssh(nodes: Sequence[Node], folder: Path) -> Iterator[str]:
    """Run an sshd on each node until the end of the block; then nothing runs on them any more.
    Yields:
        The ssh command that reaches them, by their addresses, from each of them.
    """
    for key in ("host_key", "user_key"):
        generate = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(folder / key)]
        subprocess.run(generate, check=True, capture_output=True)
    public = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text("".join(f"{node.address} {public}" for node in nodes))
    (folder / "ssh_config").write_text(CLIENT.format(folder=folder))
    # It stays: another program's sshd may run by now.
    PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
    servers: list[subprocess.Popen[bytes]] = []
    try:
        for number, node in enumerate(nodes):
            config = folder / f"sshd_config_{number}"
            config.write_text(SERVER.format(folder=folder, address=node.address))
            command = node.command(str(SSHD), "-D", "-e", "-f", str(config))
            with (folder / f"sshd_log_{number}").open("wb") as log:
                servers.append(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log, preexec_fn=_end_with_parent)
                )
        for node, server in zip(nodes, servers):
            _wait_until_it_listens(node, server)
        yield f"ssh -F {folder}/ssh_config"
    finally:
        for node in nodes:
            kill_all_on(node)
        for server in servers:
            server.wait()


def processes_on(node: Node) -> list[int]:
    """What runs on a node, but for the process that holds it."""
    there = os.readlink(f"/proc/{node.holder}/ns/net")
    found = []
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit() and int(name) != node.holder and os.readlink(f"/proc/{name}/ns/net") == there:
                found.append(int(name))
    return found


def of_the_job(node: Node) -> list[str]:
    """Command lines of what runs on a node, but for sshd."""
    commands = []
    for pid in processes_on(node):
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if command and not command.startswith(("sshd:", str(SSHD))):
                commands.append(f"{pid}: {command}")
    return commands


def wait_until_nothing_runs(nodes: Sequence[Node], seconds: float) -> list[str]:
    """Wait until nothing but sshd runs on the nodes; returns what still does after so many seconds."""
    deadline = Deadline(seconds)
    while (left := [each for node in nodes for each in of_the_job(node)]) and not deadline.has_passed:
        time.sleep(0.05)
    return left


def kill_all_on(node: Node) -> None:
    """Kill everything on a node at once, as if somebody had pulled its plug; the namespace stays."""
    deadline = Deadline(10)
    while (pids := processes_on(node)) and not deadline.has_passed:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _wait_until_it_listens(node: Node, server: subprocess.Popen[bytes]) -> None:
    deadline = Deadline(60)
    probe = node.command("bash", "-c", f"exec 3<>/dev/tcp/{node.address}/22")
    while subprocess.run(probe, capture_output=True).returncode:
        if server.poll() is not None or deadline.has_passed:
            raise RuntimeError(f"sshd does not listen on {node.address} (exit code {server.poll()})")
        time.sleep(0.02)
