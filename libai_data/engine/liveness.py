"""Whether all ranks are alive: each has a connection that closes with it, and a thread that notices.

The ranks of a node are connected to its first rank, and the first ranks of the nodes to rank 0, so that no process
holds more connections than there are ranks on a node, or nodes. Whoever sees one close without a farewell tells its
other connections at once, and ends; so the whole job ends within a moment, also under no launcher, and also while a
rank waits for the dead one in a collective. Over the same connections the ranks agree where to stop (`stop_agreement`).
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Callable, Union

from libai_data.engine.failure import end_process
from libai_data.engine.stop_agreement import PREFIX, StopAgreement
from libai_data.errors import PeerError
from libai_data.global_batch.network_link import (
    accept_leaders,
    connect_to_rank0,
    open_network_link,
    receive_head,
    send_head,
)
from libai_data.global_batch.node_link import accept_followers, connect_to_leader, open_node_link, seconds_to_meet
from libai_data.global_batch.plan import ReadPlan
from libai_data.loader.channel import Channel
from libai_data.mesh import broadcast_py_object, get_mesh

_SECONDS_FOR_THE_CAUSE = 2.0
"""How long a rank whose peer is gone waits before it ends: its own failure, if it has one, tells more."""

_SECONDS_LATER_THAN_FOLLOWERS = 0.3
"""A rank that others are connected to ends last, so that they end by their own word and not by OneFlow's abort."""

_SECONDS_TO_FLUSH = 2.0

_FAREWELL = "farewell"

Connection = Union[Channel, socket.socket]


class Liveness:
    """Watches over the ranks until this process ends. Making one is collective; so is nothing else.

    Attributes:
        stop: how the ranks agree before which step they stop.
    """

    def __init__(self) -> None:
        self._connections: dict[int, Connection] = {}
        self._names: dict[int, str] = {}
        self._above: Connection | None = None
        mesh = get_mesh()
        if mesh.world_size > 1:
            with _ending_unless_all_come(mesh.rank):
                self._connect()
        below = [connection for connection in self._connections.values() if connection is not self._above]
        self.stop = StopAgreement(
            None if self._above is None else partial(_send, self._above),
            [partial(_send, connection) for connection in below],
        )
        self._asked: int | None = None
        if mesh.world_size > 1:
            self._asked, self._ask = os.pipe()
            threading.Thread(target=self._watch, name="liveness of other ranks", daemon=True).start()

    def ask_to_stop(self) -> None:
        """Have all ranks stop before one of the next steps. For a signal's handler, in the main thread."""
        if self._asked is None:
            self.stop.ask()
        else:
            # By the thread: this one may hold the lock that sending takes, or be in the middle of a message.
            os.write(self._ask, b"!")

    def _connect(self) -> None:
        mesh = get_mesh()
        plan, rank, nodes = ReadPlan(mesh, "rank0"), mesh.rank, mesh.num_nodes
        node, leader = plan.node_of(rank), plan.leader_of(rank)
        listener, port = open_network_link() if rank == 0 and nodes > 1 else (None, 0)
        secret, port = broadcast_py_object((secrets.token_hex(16), port), src=0)
        name = f"{secret}/{node}/liveness"
        if rank != leader:
            self._above = connect_to_leader(name, rank, leader)
            self._add(self._above, f"rank {leader}")
            return
        followers = [other for other in plan.ranks_of(node) if other != leader]
        for other, channel in accept_followers(open_node_link(name), followers).items():
            self._add(channel, f"rank {other}")
        if listener is not None:
            for other, link in accept_leaders(listener, range(1, nodes), secret).items():
                self._add(link, f"rank {plan.ranks_of(other)[0]} of node {other}, or the network to it,")
        elif nodes > 1:
            host = os.environ.get("MASTER_ADDR", "127.0.0.1")
            self._above = connect_to_rank0(host, port, node, secret)
            self._add(self._above, "rank 0, or the network to it,")

    def _add(self, connection: Connection, name: str) -> None:
        self._connections[connection.fileno()] = connection
        self._names[connection.fileno()] = name

    def _watch(self) -> None:
        assert self._asked is not None  # there are other ranks
        events = select.poll()
        for descriptor in self._connections:
            events.register(descriptor, select.POLLIN)
        events.register(self._asked, select.POLLIN)
        # Also after this rank's own farewell: leaving, OneFlow waits for the others, and it would wait for a dead one.
        while True:
            for descriptor, _ in events.poll():
                if descriptor == self._asked:
                    os.read(self._asked, 1)
                    self.stop.ask()
                    continue
                word = _receive(self._connections[descriptor])
                if word.startswith(PREFIX):
                    self.stop.hear(word)
                    continue
                if word != _FAREWELL:
                    self._end(word or self._names[descriptor], told_by=descriptor)
                events.unregister(descriptor)

    def _end(self, name: str, told_by: int) -> None:
        for descriptor, connection in self._connections.items():
            if descriptor != told_by:
                _send(connection, name)
        # Said before the wait, and past all locks: OneFlow aborts the process when its own connection breaks.
        with suppress(OSError):
            os.write(2, f"rank {get_mesh().rank} ends: {name} is gone; its output tells why\n".encode())
        leads = len(self._connections) > 1
        time.sleep(_SECONDS_FOR_THE_CAUSE + (_SECONDS_LATER_THAN_FOLLOWERS if leads else 0.0))
        # If the output is stuck, and with it the main thread, that must not keep this process.
        timer = threading.Timer(_SECONDS_TO_FLUSH, os._exit, (1,))
        timer.daemon = True
        timer.start()
        logging.shutdown()
        sys.stdout.flush()
        os._exit(1)

    def farewell(self) -> None:
        """Say to the others that this rank ends as planned."""
        for connection in self._connections.values():
            _send(connection, _FAREWELL)


@contextmanager
def _ending_unless_all_come(rank: int) -> Iterator[None]:
    """End this process if the block, in which all ranks must meet, takes too long; it may wait in a collective."""
    seconds = seconds_to_meet()
    message = f"rank {rank} ends: the other ranks have not all come within {seconds:g} s; do they run the same program?"
    # A rank that waits for connections says who is missing, and is to say it first.
    timer = threading.Timer(seconds + _SECONDS_FOR_THE_CAUSE, end_process, (1, message))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _send(connection: Connection, word: str) -> None:
    with suppress(OSError):
        if isinstance(connection, Channel):
            connection.send(word)
        else:
            send_head(connection, {"word": word})


def _receive(connection: Connection) -> str:
    """A farewell, the name of a rank that is gone, or nothing if the other end itself is gone."""
    try:
        return str(connection.receive() if isinstance(connection, Channel) else receive_head(connection)["word"])
    except (OSError, EOFError, ValueError, LookupError, PeerError):
        return ""


_liveness: Liveness | None = None


def watch_over_ranks() -> Liveness:
    """Begin to watch over the other ranks, once a job. Collective.

    From now on the process takes leave of the others when it ends by itself, and an exception that nobody catches ends
    it without leave, at once.
    """
    global _liveness
    if _liveness is None:
        _liveness = Liveness()
        if get_mesh().world_size > 1:
            atexit.register(say_farewell)
            sys.excepthook = partial(_end_after, sys.excepthook)
    return _liveness


def _end_after(print_exception: Callable[..., Any], *exception: Any) -> None:
    print_exception(*exception)
    end_process(1, f"rank {get_mesh().rank} ends: see the exception above")


def say_farewell() -> None:
    """Let the other ranks know that this one ends as planned."""
    global _liveness
    if _liveness is not None:
        _liveness.farewell()
        _liveness = None
