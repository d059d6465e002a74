"""Whether all ranks are alive: each has a connection that closes with it, and a thread that notices.

The ranks of a node are connected to its first rank, and the first ranks of the nodes to rank 0, so that no process
holds more connections than there are ranks on a node, or nodes. Whoever sees one close without a farewell ends; so the
whole job ends within a moment, also under no launcher, and also while a rank waits for the dead one in a collective.
"""

from __future__ import annotations

import atexit
import os
import secrets
import select
import socket
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any, Callable, Dict, Optional, Union

from libai_data.engine.failure import end_process
from libai_data.global_batch.network import accept_leaders, connect_to_rank0, open_network_link
from libai_data.global_batch.node_link import accept_followers, connect_to_leader, open_node_link
from libai_data.global_batch.plan import ReadPlan
from libai_data.loader.channel import Channel
from libai_data.mesh import broadcast_py_object, get_mesh

_SECONDS_FOR_THE_CAUSE = 2.0
"""How long a rank whose peer is gone waits before it ends: its own failure, if it has one, is the better message."""

_FAREWELL = "farewell"

Connection = Union[Channel, socket.socket]


class Liveness:
    """Watches over the ranks from now on until `farewell`. Making one is collective; so is nothing else."""

    def __init__(self) -> None:
        self._said_farewell = False
        self._connections: Dict[int, Connection] = {}
        self._names: Dict[int, str] = {}
        mesh = get_mesh()
        if mesh.world_size > 1:
            self._connect()
            threading.Thread(target=self._watch, name="liveness of other ranks", daemon=True).start()

    def _connect(self) -> None:
        mesh = get_mesh()
        plan, rank, nodes = ReadPlan(mesh, "rank0"), mesh.rank, mesh.num_nodes
        node, leader = plan.node_of(rank), plan.leader_of(rank)
        listener, port = open_network_link() if rank == 0 and nodes > 1 else (None, 0)
        secret, port = broadcast_py_object((secrets.token_hex(16), port), src=0)
        name = f"{secret}/{node}/liveness"
        if rank != leader:
            self._add(connect_to_leader(name, rank, leader), f"rank {leader}")
            return
        followers = [other for other in plan.ranks_of(node) if other != leader]
        for other, channel in accept_followers(open_node_link(name), followers).items():
            self._add(channel, f"rank {other}")
        if listener is not None:
            for other, link in accept_leaders(listener, range(1, nodes), secret).items():
                self._add(link, f"rank {plan.ranks_of(other)[0]} of node {other}, or the network to it,")
        elif nodes > 1:
            host = os.environ.get("MASTER_ADDR", "127.0.0.1")
            self._add(connect_to_rank0(host, port, node, secret), "rank 0, or the network to it,")

    def _add(self, connection: Connection, name: str) -> None:
        self._connections[connection.fileno()] = connection
        self._names[connection.fileno()] = name

    def _watch(self) -> None:
        events = select.poll()
        for descriptor in self._connections:
            events.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in events.poll():
                if self._said_farewell:
                    return
                if not _is_farewell(self._connections[descriptor]):
                    self._end(self._names[descriptor])
                events.unregister(descriptor)

    def _end(self, name: str) -> None:
        time.sleep(_SECONDS_FOR_THE_CAUSE)
        if not self._said_farewell:
            end_process(1, f"rank {get_mesh().rank} ends: {name} is gone; its output tells why")

    def farewell(self) -> None:
        """Say to the others that this rank ends as planned."""
        self._said_farewell = True
        for connection in self._connections.values():
            with suppress(OSError):
                if isinstance(connection, Channel):
                    connection.send(_FAREWELL)
                else:
                    connection.sendall(_FAREWELL.encode())


def _is_farewell(connection: Connection) -> bool:
    try:
        if isinstance(connection, Channel):
            return bool(connection.receive() == _FAREWELL)
        return connection.recv(len(_FAREWELL)) == _FAREWELL.encode()
    except (OSError, EOFError):
        return False


_liveness: Optional[Liveness] = None


def watch_over_ranks() -> None:
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


def _end_after(print_exception: Callable[..., Any], *exception: Any) -> None:
    print_exception(*exception)
    end_process(1, f"rank {get_mesh().rank} ends: see the exception above")


def say_farewell() -> None:
    """Let the other ranks know that this one ends as planned."""
    global _liveness
    if _liveness is not None:
        _liveness.farewell()
        _liveness = None
