"""Connects the ranks over TCP, at the address that OneFlow would use: rank 0 listens, and the others connect.

Every wait has a limit. A rank that reaches the limit names the missing ranks, or says why it could not connect.
"""

from __future__ import annotations

import errno
import resource
import select
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from libai_data.commands.doctor.rank import JobRank
from libai_data.commands.doctor.reports import OK, RED, WARNING, Finding, Reports
from libai_data.errors import PeerError, by_rank, numbers_in_words
from libai_data.launch.job_environment import SECRET_VARIABLE
from libai_data.launch.ports import listen
from libai_data.mesh.peers.links import BACKLOG, Reception, introduce, receive_head, send_head

_SECONDS_BETWEEN_TRIES = 0.1
_SECONDS_TO_ANSWER = 5.0
_SECONDS_TO_REACH_A_PORT = 3.0
_DESCRIPTORS_BESIDE = 256
_DISCONNECTED = (OSError, EOFError, ValueError, PeerError)


class Meeting:
    """Rank 0's side: connected ranks (`links`), their `reports`, and the check that each began last (`last_words`)."""

    def __init__(self, job: JobRank, seconds: float) -> None:
        self._world_size = job.world_size
        self._deadline = time.monotonic() + seconds
        self.links: dict[int, socket.socket] = {}
        self.reports: dict[int, Any] = {}
        self.last_words: dict[int, str] = {}
        _allow_descriptors(job.world_size)
        self._reception = Reception(_listening(job.port), job.key)

    def gather(self) -> None:
        """Receive the reports of all ranks, until the time limit. The report of a rank that disconnects is None."""
        while len(self.reports) < self._world_size - 1 and time.monotonic() < self._deadline:
            silent = {link.fileno(): rank for rank, link in self.links.items() if rank not in self.reports}
            poll = select.poll()
            for descriptor in silent:
                poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll(1000 * _SECONDS_BETWEEN_TRIES):
                self._receive_from(silent[descriptor])
            while not self._reception.came.empty():
                self._let_in(*self._reception.came.get())

    def _let_in(self, who: dict[str, Any], link: socket.socket) -> None:
        rank = int(who["rank"])
        if not 0 < rank < self._world_size or rank in self.links:
            link.close()
            return
        link.settimeout(_SECONDS_TO_ANSWER)
        self.links[rank] = link

    def _receive_from(self, rank: int) -> None:
        try:
            head = receive_head(self.links[rank])
        except _DISCONNECTED:
            self.reports[rank] = None  # disconnected; the rank's own output shows the reason
            return
        if "report" in head:
            self.reports[rank] = head["report"]
        else:
            self.last_words[rank] = str(head.get("at"))

    def unreached_ports(self, ranks: list[int]) -> dict[int, str]:
        """Ranks that cannot reach a port of this machine which the system chose: rank -> reason."""
        answers: dict[int, str] = {}
        with _listening(0) as other:
            for rank in ranks:
                with suppress(OSError):
                    send_head(self.links[rank], {"reach": other.getsockname()[1]})
            for rank in ranks:
                with suppress(*_DISCONNECTED):
                    answers[rank] = str(receive_head(self.links[rank])["unreached"])
        return {rank: why for rank, why in answers.items() if why}

    def dismiss(self, code: int) -> None:
        """Send the exit code to all ranks, and close their connections."""
        for link in self.links.values():
            with suppress(OSError):
                send_head(link, {"end": code})
            link.close()
        self._reception.close()


def _allow_descriptors(connections: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _DESCRIPTORS_BESIDE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _listening(port: int) -> socket.socket:
    try:
        return listen(port, BACKLOG)
    except OSError as error:
        raise PeerError(f"rank 0 cannot listen on port {port}: {error.strerror}; choose another MASTER_PORT") from error


def call_rank0(job: JobRank, seconds: float) -> socket.socket:
    """Connect a rank to rank 0 within `seconds`; a PeerError says why this failed."""
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            link = socket.create_connection((job.host, job.port), timeout=max(left, _SECONDS_BETWEEN_TRIES))
            break
        except OSError as error:
            if isinstance(error, socket.gaierror) or time.monotonic() > deadline:
                where = f"rank {job.rank} cannot reach rank 0 at {job.host}, port {job.port}, within {seconds:g} s"
                raise PeerError(f"{where}: {why_unreached(error)}") from error
            time.sleep(_SECONDS_BETWEEN_TRIES)
    left = max(deadline - time.monotonic(), min(_SECONDS_TO_ANSWER, seconds / 2))
    try:
        introduce(link, {"rank": job.rank}, job.key, left)
    except PeerError as error:
        raise PeerError(f"rank {job.rank} reaches {job.host}, port {job.port}, but {error}") from error
    return link


def why_unreached(error: OSError) -> str:
    """The likely reason of a failed connection, and what to check."""
    if isinstance(error, socket.gaierror):
        return (
            f"this machine cannot resolve the name ({error.strerror}); correct MASTER_ADDR, or the name resolution of "
            "this machine"
        )
    if isinstance(error, socket.timeout) or error.errno == errno.ETIMEDOUT:
        return "no answer; a firewall drops the packets, or MASTER_ADDR is the address of another machine"
    if error.errno == errno.ECONNREFUSED:
        return "no program listens there; was rank 0 started, with the same MASTER_ADDR and MASTER_PORT?"
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return (
            f"there is no route to it ({error.strerror}); is MASTER_ADDR an address of the network that connects the "
            "nodes?"
        )
    return str(error)


def answer_until_dismissed(link: socket.socket, job: JobRank, seconds: float) -> int:
    """Answer rank 0's requests until it sends the exit code, which is returned; a PeerError if it is gone."""
    link.settimeout(seconds)
    while True:
        try:
            head = receive_head(link)
            if "end" in head:
                return int(head["end"])
            send_head(link, {"unreached": _why_port_is_unreached(job.host, int(head["reach"]))})
        except (OSError, EOFError) as error:
            raise PeerError(f"rank {job.rank} ends: rank 0 is gone; see its output") from error


def _why_port_is_unreached(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), timeout=_SECONDS_TO_REACH_A_PORT).close()
    except OSError as error:
        return why_unreached(error)
    return ""


MASTER = "master"


def judge_meeting(
    reports: Reports, last_words: Mapping[int, str], address: str, has_secret: bool = True
) -> list[Finding]:
    """Name the ranks that are missing, that did not finish a check, or that cannot reach all ports of rank 0."""
    found: list[Finding] = []
    missing = [rank for rank in range(reports.world_size) if rank not in reports.of_rank]
    never = [rank for rank in missing if rank not in last_words]
    if never:
        advice = "see the output of these ranks; if there is none, the ranks were not started"
        found.append(Finding(RED, f"rank {numbers_in_words(never)} did not reach {address}", advice))
    stuck = {rank: f"'{last_words[rank]}'" for rank in missing if rank in last_words}
    if stuck:
        advice = "see the output of these ranks; storage that does not answer can be the cause, too"
        found.append(Finding(RED, f"reached rank 0, but did not finish {by_rank(stuck)}", advice))
    unreached = {rank: str(facts["unreached"]) for rank, facts in reports.facts(MASTER).items()}
    if unreached:
        advice = (
            "allow connections between the nodes at all ports: OneFlow, readers=rank0 and the watchdog of the ranks "
            "use ports that the system chooses"
        )
        words = f"some ranks cannot reach a port of rank 0 that the system chose: {by_rank(unreached)}"
        found.append(Finding(RED, words, advice))
    if not has_secret:
        advice = f"set {SECRET_VARIABLE} to the same random words on all machines, or start them with --hostfile"
        words = "the ranks share no secret, so any program that reaches rank 0 could join as a rank"
        found.append(Finding(WARNING, words, advice))
    if not missing and not unreached:
        found.insert(0, Finding(OK, f"all {reports.world_size} ranks reach {address}"))
    return found
