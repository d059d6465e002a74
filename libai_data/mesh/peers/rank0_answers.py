"""Rank 0 answers questions about its job, over UDP at port MASTER_PORT.

OneFlow listens on the TCP port only until all ranks have joined. Without an answer, a rank of another job that starts
later, on any machine, waits for a rank 0 until its time limit. If a firewall drops UDP, the rank waits in this way.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from libai_data.errors import ConfigError
from libai_data.launch.job_environment import job_id
from libai_data.launch.parent_pipe import keep_from_forks
from libai_data.launch.ports import bound, check_host

_QUESTION = b"libai_data: which job?"
_LONGEST = 1024
_TRIES = 3
_SECONDS_TO_ANSWER = 0.3
_SECONDS_BETWEEN_TRIES = 0.1
# A rank of the previous job may take 4.3 s to end (`watchdog`), while the next job already starts.
_SECONDS_FOR_PREDECESSOR = 5.0


class Rank0Answers:
    """Answers for rank 0 until this object is closed. If another program has the UDP port, there are no answers."""

    def __init__(self, port: int, has_joined: bool) -> None:
        self._answer = json.dumps({"job": job_id(), "has_joined": has_joined}).encode()
        self._socket: socket.socket | None = None
        with suppress(OSError):
            self._socket = bound(port, socket.SOCK_DGRAM)

    def filenos(self) -> list[int]:
        """The descriptor at which questions arrive, if there is one."""
        return [] if self._socket is None else [self._socket.fileno()]

    def answer_one(self) -> None:
        """Wait for a question and answer it."""
        if self._socket is not None:
            question, sender = self._socket.recvfrom(_LONGEST)
            if question == _QUESTION:
                self._socket.sendto(self._answer, sender)

    def close(self) -> None:
        """Answer no more."""
        if self._socket is not None:
            self._socket.close()

    def answer_from_now_on(self) -> None:
        """Answer in a thread, until this process ends."""
        if self._socket is not None:
            keep_from_forks(self._socket)
            threading.Thread(target=self._answer_all, name="answers of rank 0", daemon=True).start()

    def _answer_all(self) -> None:
        while True:
            with suppress(OSError):  # The sender cannot be reached.
                self.answer_one()


def refuse_rank0_of_another_job(rank: int, port: int) -> None:
    """Before this process joins the job, ask the rank 0 at the job's port about its job, if one answers.

    Raises:
        ConfigError: That rank 0 belongs to another job, or has met all its ranks; or MASTER_ADDR is no address.
    """
    host = os.environ.get("MASTER_ADDR", "")
    check_host("MASTER_ADDR", host)
    deadline = time.monotonic() + _SECONDS_FOR_PREDECESSOR
    while (answer := _ask(host, port)) is not None:
        if rank > 0 and answer["job"] == job_id() and not answer["has_joined"]:
            return
        if time.monotonic() > deadline:
            state = "has met all its ranks" if answer["has_joined"] else "waits for its ranks"
            raise ConfigError(
                f"rank {rank} cannot join: rank 0 of another job ({answer['job']}) uses port {port} at {host} and "
                f"{state}; give each job its own --master_port (MASTER_PORT)"
            )
        time.sleep(_SECONDS_BETWEEN_TRIES)


def _ask(host: str, port: int) -> dict[str, Any] | None:
    """The answer of rank 0; None if there is no answer."""
    with suppress(OSError):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM) if host else []
        for family, *_, address in found:
            with socket.socket(family, socket.SOCK_DGRAM) as client:
                client.settimeout(_SECONDS_TO_ANSWER)
                client.connect(address)
                answer = _answer_to(client)
                if answer is not None:
                    return answer
    return None


def _answer_to(client: socket.socket) -> dict[str, Any] | None:
    for _ in range(_TRIES):
        try:
            client.send(_QUESTION)
            answer = json.loads(client.recv(_LONGEST))
        except socket.timeout:
            continue
        except (OSError, ValueError):  # No program has the port, or another program.
            return None
        return answer if isinstance(answer, dict) and answer.keys() == {"job", "has_joined"} else None
    return None
