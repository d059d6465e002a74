"""The connections of a rank to its neighbours.

The ranks of a node are connected to its first rank, and the first ranks of the nodes to rank 0. So no process has more
connections than ranks on a node, or nodes. Connections between nodes are made at the first collective of this package,
where the ranks also compare their job and their machines.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Callable

from libai_data.errors import MeshError, PeerError
from libai_data.launch.job_environment import job_key, proof
from libai_data.mesh.peers.batch_notes import BatchNotes, shared_memory
from libai_data.mesh.peers.links import (
    Connection,
    Word,
    accept_leaders,
    connect_to_leader,
    connect_to_rank0,
    let_in,
    open_network_link,
    open_node_link,
    receive_head,
    seconds_to_meet,
    send_head,
    send_word,
)
from libai_data.mesh.peers.same_job import check_same_job, facts_of_rank, told_by_rank0

_SECONDS_FOR_PREDECESSOR = 10.0


class RankLinks:
    """The connections of one rank. Its main thread and the thread that watches share them.

    `first_words` returns the words to send first over each new connection.
    """

    def __init__(self, rank: int, world_size: int, num_nodes: int, first_words: Callable[[], Iterable[Word]]) -> None:
        self.changed = threading.Condition()  # held when the connections change, and notified afterwards
        self._rank, self._world_size, self._nodes = rank, world_size, num_nodes
        self._first_words = first_words
        self._per_node = world_size // num_nodes
        self._node = rank // self._per_node
        self.leader = self._node * self._per_node  # the first rank of this node
        # The other ranks of this node, if this rank is the first one.
        self.followers = [] if rank != self.leader else list(range(rank + 1, rank + self._per_node))
        self.above: Connection | None = None  # towards rank 0; None there, and before it is made
        self.connections: dict[int, Connection] = {}
        self._names: dict[int, str] = {}
        self.notes: BatchNotes | None = None  # of this node; None before the first rank has sent its memory
        if self.followers:
            self._notes_memory = shared_memory(self._per_node)
            self.notes = BatchNotes(self._notes_memory, 0, self._per_node)
        if world_size > 1:
            self.calls, self._call = os.pipe()  # the first descriptor is readable after `call`

    def call(self, word: bytes) -> None:
        """Wake the thread that watches. A signal handler of the main thread may call this."""
        os.write(self._call, word)

    def name_of(self, descriptor: int) -> str:
        """The rank at the other end of a connection, in words; they begin with "rank" and its number."""
        return self._names[descriptor]

    def below(self) -> list[Connection]:
        """The connections away from rank 0."""
        return [each for each in list(self.connections.values()) if each is not self.above]

    def send_to_all(self, *word: Any, but: int = -1) -> None:
        """Send a word over each connection, except the one with descriptor `but`."""
        for descriptor, connection in list(self.connections.items()):
            if descriptor != but:
                send_word(connection, *word)

    def meet(self) -> None:
        """Compare job and machine with rank 0, and complete the connections; all ranks call this together.

        Raises PeerError if a rank cannot be reached in time, and MeshError as `check_same_job`.
        """
        listener, port = open_network_link() if self._rank == 0 and self._nodes > 1 else (None, 0)
        own = facts_of_rank(key=secrets.token_hex(16), port=port)
        theirs = told_by_rank0(own)
        check_same_job(own, theirs, self._rank, self._world_size, self._nodes)
        with self.changed:
            seconds, expected = seconds_to_meet(), len(self.followers) if self._rank == self.leader else 1
            if not self.changed.wait_for(lambda: len(self.connections) >= expected, seconds):
                raise PeerError(f"rank {self._rank} and the others of its node could not connect within {seconds:g} s")
        if listener is not None:
            nodes = {own["machine"]: 0}
            for node, link in accept_leaders(listener, range(1, self._nodes), theirs["key"]).items():
                other = nodes.setdefault(receive_head(link)["machine"], node)
                if other != node:
                    raise MeshError(
                        f"nodes {other} and {node} run on one machine, where OneFlow computes wrong sums; start one "
                        "launcher on each machine"
                    )
                self._add(link, f"rank {node * self._per_node} of node {node}, or the network to it,")
        elif self._nodes > 1 and self._rank == self.leader:
            host = os.environ.get("MASTER_ADDR", "127.0.0.1")
            self.above = connect_to_rank0(host, theirs["port"], self._node, theirs["key"])
            send_head(self.above, {"machine": own["machine"]})
            self._add(self.above, "rank 0, or the network to it,")

    def _add(self, connection: Connection, name: str) -> None:
        with self.changed:
            for word in self._first_words():
                send_word(connection, *word)
            self.connections[connection.fileno()] = connection
            self._names[connection.fileno()] = name
            self.changed.notify_all()
        self.call(b"c")

    def open_to_node(self) -> socket.socket | None:
        """Connect to the first rank of the node, or listen there; a PeerError if another job has its address."""
        name = f"{proof(job_key(), 'node', self._node)[:32]}/liveness"
        if self.followers:
            return self._listen(name)
        if self._rank != self.leader:
            above = connect_to_leader(name, self._rank, self.leader, float("inf"))
            with suppress(OSError, EOFError):  # If the leader is gone, its connection is closed, which is noticed next.
                descriptor = above.receive_descriptor()
                self.notes = BatchNotes(descriptor, self._rank - self.leader, self._per_node)
                os.close(descriptor)
            self.above = above
            self._add(above, f"rank {self.leader}")
        return None

    def _listen(self, name: str) -> socket.socket:
        deadline = time.monotonic() + _SECONDS_FOR_PREDECESSOR
        while True:
            try:
                return open_node_link(name)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    where = f"{os.environ.get('MASTER_ADDR')}, port {os.environ.get('MASTER_PORT')}"
                    raise PeerError(
                        f"rank {self._rank} cannot meet the other ranks of its node ({error}); another job on this "
                        f"machine uses {where}: give each its own --master_port"
                    ) from error
                time.sleep(0.1)

    def accept(self, listener: socket.socket) -> None:
        """Accept a connection of another rank of this node."""
        rank, channel = let_in(listener.accept()[0])
        if rank not in self.followers or f"rank {rank}" in self._names.values():
            channel.close()
            return
        with suppress(OSError):  # If the rank is gone, its connection is closed, which is noticed next.
            channel.send_descriptor(self._notes_memory)
        self._add(channel, f"rank {rank}")
