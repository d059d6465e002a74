"""A SLURM of one machine, with ports, keys and folders of its own: munged, slurmctld and slurmd, as Debian has them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from libai_data.launch.ports import free_port
from tests.deadline import wait_until
from tests.distributed.namespaces import _end_with_parent

PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
DAEMONS = ("munged", "slurmctld", "slurmd")
CLIENTS = ("sbatch", "srun", "scontrol", "squeue", "scancel")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""


def why_no_slurm() -> str | None:
    """Why this machine cannot run SLURM for a test; None if it can."""
    if os.geteuid() != 0:
        return "a SLURM of one machine needs root"
    missing = [program for program in (*DAEMONS, *CLIENTS) if shutil.which(program, path=PATH) is None]
    if missing:
        return f"a SLURM of one machine needs {', '.join(missing)} (Debian: slurmctld, slurmd, slurm-client, munge)"
    return None


@contextmanager
def one_machine_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Run SLURM until the end of the block; none of its processes, nor of its jobs', is there afterwards.

    Args:
        folder: for what it writes, which `munged` wants to be nobody else's; short, since it holds a socket.

    Yields:
        The environment in which its commands find it.
    """
    host = socket.gethostname().partition(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    ports = {"controller": free_port(), "daemon": free_port()}
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=host, folder=folder, cores=os.cpu_count(), **ports))
    environment = {**os.environ, "SLURM_CONF": str(config), "PATH": PATH}
    files = ("key-file=munge.key", "socket=munge.sock", "pid-file=munged.pid", "log-file=munged.log", "seed-file=seed")
    munged = [f"--{name}={folder}/{file}" for name, file in (each.split("=") for each in files)]
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        with (folder / f"{command[0]}.out").open("wb") as log:
            daemons.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    preexec_fn=_end_with_parent,
                )
            )

    try:
        start("munged", "--foreground", "--force", *munged)
        wait_until((folder / "munge.sock").exists, "munged")
        start("slurmctld", "-D", "-f", str(config))
        start("slurmd", "-D", "-f", str(config))
        idle = ["sinfo", "--noheader", "--format=%T"]
        wait_until(lambda: b"idle" in subprocess.run(idle, env=environment, capture_output=True).stdout, "slurmd")
        yield environment
    finally:
        if len(daemons) == 3:
            subprocess.run(["scancel", "--user=root", "--signal=KILL", "--full"], env=environment, capture_output=True)
        for daemon in reversed(daemons):
            daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()
        _end_the_steps(folder)


def _end_the_steps(folder: Path) -> None:
    """Kill what keeps the jobs of this SLURM, and outlives its daemons."""
    mark = f"SLURM_CONF={folder}/slurm.conf".encode()
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit() and mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                os.kill(int(name), signal.SIGKILL)
