"""Whether ranks that connect belong to one job, and run on the machines that OneFlow expects.

OneFlow joins a rank to any rank 0 that listens on its port. So if two jobs with one port start at the same time, ranks
of one job may join the other job. A rank therefore asks rank 0 first. On the machine of rank 0, a rank waits until a
process has reserved the port, and checks whether this process is rank 0 of its own job.

Without a secret, two jobs of as many ranks at one address and port have the same name, and only the processes on the
machine of rank 0 tell them apart. So a rank of another machine, or one that was started by itself, may join the job
whose rank 0 waits. When the ranks meet, they compare their programs.

Rank 0 answers over UDP at port MASTER_PORT, because OneFlow listens on the TCP port only until all ranks have joined.
Without an answer, a rank of another job that starts later, on any machine, waits for a rank 0 until its time limit. So
does the rank if a firewall drops UDP.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from libai_data.errors import ConfigError, MeshError, numbers_in_words
from libai_data.launch.job_environment import SECRET_VARIABLE, job_id, machine, proof
from libai_data.launch.parent_pipe import keep_from_forks
from libai_data.launch.ports import bound, check_host, is_listened_on, is_this_machine, process_with_port
from libai_data.launch.same_interpreter import arguments

logger = logging.getLogger(__name__)

RANK_0 = "rank 0"
_POLL_SECONDS = 0.02

_QUESTION = b"libai_data: which job?"
_LONGEST = 1024
_TRIES = 3
_MOST_REPORTS = 10  # strangers may ask, too
_SECONDS_TO_ANSWER = 0.3
_SECONDS_BETWEEN_TRIES = 0.1
# A rank of the previous job may take 4.3 s to end (`watchdog`), while the next job already starts.
_SECONDS_FOR_PREDECESSOR = 5.0


class Rank0Answers:
    """Answers for rank 0 until this object is closed. If another program has the UDP port, there are no answers."""

    def __init__(self, port: int, has_joined: bool) -> None:
        self._world_size = os.environ.get("WORLD_SIZE", "")
        self._machine_of: dict[str, str] = {}
        self._reported: set[str] = set()
        self._answer = json.dumps({"job": job_id(), "has_joined": has_joined}).encode()
        try:
            self._socket = bound(port, socket.SOCK_DGRAM)
        except OSError:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)  # It has no port, so no question comes.

    def fileno(self) -> int:
        """The descriptor at which questions arrive."""
        return self._socket.fileno()

    def answer_one(self) -> str:
        """Wait for a question and answer it; returns what to report of the rank that asked, "" if nothing is wrong."""
        question, sender = self._socket.recvfrom(_LONGEST)
        if not question.startswith(_QUESTION):
            return ""
        self._socket.sendto(self._answer, sender)
        return self._problem(question[len(_QUESTION) :].decode(errors="replace").split(), sender[0])

    def _problem(self, told: Sequence[str], host: str) -> str:
        """The problem of a rank that asked, if its launcher was started with other numbers than that of rank 0."""
        if len(told) != 3 or not "".join(told[:2]).isdecimal():
            return ""
        world_size, rank, where = told
        has = ""
        if world_size != self._world_size:
            has = f"WORLD_SIZE {world_size} instead of {self._world_size}"
        elif self._machine_of.setdefault(rank, where) != where:
            has = f"RANK {rank}, as a rank of another machine has"
        if not has or has in self._reported or len(self._reported) == _MOST_REPORTS:
            return ""
        self._reported.add(has)
        return (
            f"rank 0 waits for its ranks. A rank of {host.replace('::ffff:', '')} that asks to join has {has}. If it "
            "belongs to this job, start the launchers of all machines again, with equal --nnodes and "
            "--nproc_per_node, and each with its own --node_rank\n"
        )

    def close(self) -> None:
        """Answer no more."""
        self._socket.close()

    def answer_from_now_on(self) -> None:
        """Answer in a thread, until this process ends."""
        keep_from_forks(self._socket)
        threading.Thread(target=self._answer_all, name="answers of rank 0", daemon=True).start()

    def _answer_all(self) -> None:
        while True:
            with suppress(OSError):  # The sender cannot be reached.
                self.answer_one()


def question_of(rank: int) -> bytes:
    """What a rank sends to ask rank 0 for its job."""
    where = proof(machine(), "machine")[:12]
    return f"{_QUESTION.decode()} {os.environ.get('WORLD_SIZE')} {rank} {where}".encode()


def refuse_rank0_of_another_job(rank: int, port: int) -> None:
    """Raise ConfigError if rank 0 of another job has the port, or a rank 0 that has met all its ranks."""
    host = os.environ.get("MASTER_ADDR", "")
    check_host("MASTER_ADDR", host)
    deadline = time.monotonic() + _SECONDS_FOR_PREDECESSOR
    while (answer := _ask(host, port, question_of(rank))) is not None:
        if rank > 0 and answer["job"] == job_id() and not answer["has_joined"]:
            return
        if time.monotonic() > deadline:
            state = "has met all its ranks" if answer["has_joined"] else "waits for its ranks"
            raise ConfigError(
                f"rank {rank} cannot join: rank 0 of another job ({answer['job']}) uses port {port} at {host} and "
                f"{state}; give each job its own --master_port (MASTER_PORT). If it is one job, start it with equal "
                f"--nproc_per_node, --nnodes and {SECRET_VARIABLE} on all machines: here, WORLD_SIZE is "
                f"{os.environ.get('WORLD_SIZE')}"
            )
        time.sleep(_SECONDS_BETWEEN_TRIES)


def _ask(host: str, port: int, question: bytes) -> dict[str, Any] | None:
    """The answer of rank 0; None if there is no answer."""
    found: Sequence[Any] = ()
    with suppress(OSError):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM) if host else ()
    for family, *_, address in found:
        # If no program has the port, or another program, there are these errors.
        with suppress(OSError, ValueError), socket.socket(family, socket.SOCK_DGRAM) as client:
            client.settimeout(_SECONDS_TO_ANSWER)
            client.connect(address)
            for _ in range(_TRIES):
                with suppress(socket.timeout):
                    client.send(question)
                    answer = json.loads(client.recv(_LONGEST))
                    if isinstance(answer, dict) and answer.keys() == {"job", "has_joined"}:
                        return answer
                    break
    return None


def wait_for_own_rank0(rank: int, port: int) -> None:
    """Before OneFlow is imported, wait until rank 0 has reserved the port, if it is on this machine.

    Raises ConfigError if the rank 0 at this port belongs to another job, or has met all its ranks.
    """
    refuse_rank0_of_another_job(rank, port)
    if not is_this_machine(os.environ.get("MASTER_ADDR", "")):
        return
    # If rank 0 imports this package after OneFlow, or not at all, it only listens on the port.
    while (rank0 := process_with_port(port, RANK_0)) is None and not is_listened_on(port):
        time.sleep(_POLL_SECONDS)
        refuse_rank0_of_another_job(rank, port)
    if rank0 and _is_of_another_job(rank0):
        raise ConfigError(
            f"port {port} is in use on this machine, by rank 0 of another job (process {rank0}); give each job its own "
            "--master_port"
        )


def hash_of_text() -> int:
    """The hash of a text, which is the same in processes with the same hash seed."""
    return hash("libai_data")


def warn_of_hash_seeds(ranks: Sequence[int]) -> None:
    """Log a warning if there are ranks that have another `hash_of_text` than rank 0."""
    if ranks:
        logger.warning(
            f"Rank {numbers_in_words(ranks)} has another hash seed than rank 0, so a set of texts has another order "
            "there. If such a set decides samples or labels, the ranks train on different data. Start the ranks by "
            "libai-data launch, or set PYTHONHASHSEED=0 for all of them."
        )


def _is_of_another_job(rank0: int) -> bool:
    """Whether the job of process `rank0` has another number of ranks, or already a rank with this process's number.

    Ranks of one job have several launchers if a user started them one by one, from several terminals.
    """
    launcher = _launcher_of(rank0)
    if launcher == _launcher_of(os.getpid()):
        return False
    theirs = [_environment_of(rank0), *map(_environment_of, _children_of(launcher))]
    if theirs[0].get("WORLD_SIZE", "") not in ("", os.environ.get("WORLD_SIZE")):
        return True
    return any(all(each.get(name) == os.environ.get(name) for name in ("RANK", "MASTER_PORT")) for each in theirs)


def _launcher_of(rank: int) -> int:
    """The closest ancestor of a rank that was not started with the RANK and MASTER_PORT of this rank."""
    own = _environment_of(rank)
    while rank > 1:
        rank = _parent_of(rank)
        theirs = _environment_of(rank)
        if "RANK" not in own or any(theirs.get(name) != own[name] for name in ("RANK", "MASTER_PORT") if name in own):
            break
    return rank


def _environment_of(process: int) -> dict[str, str]:
    """The environment with which a process was started; {} if this process may not read it."""
    with suppress(OSError):
        entries = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
        return dict(entry.partition("=")[::2] for entry in entries)
    return {}


def _parent_of(process: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return 0


def _children_of(process: int) -> Iterator[int]:
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            yield from map(int, children.read_text().split())


def facts_of_rank(**others: Any) -> dict[str, Any]:
    """What this rank compares with rank 0 when they meet, and `others`."""
    return {"job": job_id(), "machine": machine(), "program": arguments(), "hash": hash_of_text(), **others}


def told_by_rank0(facts: dict[str, Any]) -> dict[str, Any]:
    """Broadcast `facts` of rank 0 over OneFlow's own connections. Collective."""
    import oneflow as flow

    sent = json.dumps(facts).encode() if flow.env.get_rank() == 0 else None
    received: dict[str, Any] = json.loads(flow._oneflow_internal.cpu_broadcast(sent, 0))
    return received


def check_same_job(own: dict[str, Any], theirs: dict[str, Any], rank: int, world_size: int, nodes: int) -> None:
    """Compare the `facts_of_rank` of this rank (`own`) with those of rank 0 (`theirs`); warn of suspicious differences.

    Raises:
        MeshError: The ranks belong to two jobs, two nodes are on one machine, or one node is on two machines.
    """
    where = f"{os.environ.get('MASTER_ADDR')}, port {os.environ.get('MASTER_PORT')}"
    if own["job"] != theirs["job"]:
        raise MeshError(
            f"rank {rank} of job {own['job']} met rank 0 of job {theirs['job']} at {where}; two jobs use one "
            "port: give each its own --master_port"
        )
    per_node = world_size // nodes
    node, expected = divmod(rank, per_node)
    if (own["machine"] == theirs["machine"]) != (node == 0):
        here = "the machine of rank 0" if node else "another machine than rank 0"
        raise MeshError(
            f"rank {rank} of node {node} runs on {here}: OneFlow computes wrong sums when two nodes "
            "run on one machine, or one node on two. Start one launcher on each machine, and use no loopback "
            f"address as --master_addr (met at {where})"
        )
    local_rank = os.environ.get("LOCAL_RANK", "")
    if local_rank.isdigit() and int(local_rank) != expected:
        raise MeshError(
            f"rank {rank} was started as local rank {local_rank}, but OneFlow found {nodes} node(s) of "
            f"{per_node} rank(s) at {where}. Two nodes need two machines, each with an "
            "address of its own: OneFlow computes wrong sums when both run on one"
        )
    if own["program"] != theirs["program"] and not os.environ.get(SECRET_VARIABLE):
        ours, its = (" ".join(each["program"]) for each in (own, theirs))
        logger.warning(
            f"Rank {rank} was started as '{ours}', but rank 0 as '{its}'. If they belong to two jobs that use {where}: "
            f"give each job its own --master_port, or a secret of its own in {SECRET_VARIABLE}."
        )
    warn_of_hash_seeds([rank] if own["hash"] != theirs["hash"] else [])
