"""The link between nodes: TCP connections from the leader of each node to rank 0.

Messages are JSON. Only the nesting of a nested batch is sent as a pickle, because the batch may contain named tuples of
the user's classes. Both ends prove that they know a key of the job. The key is never sent. The messages are neither
encrypted nor signed.
"""

from __future__ import annotations

import hmac
import json
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Union

from libai_data.errors import PeerError
from libai_data.launch.job_environment import proof
from libai_data.launch.parent_pipe import keep_from_forks
from libai_data.launch.ports import listen
from libai_data.mesh.peers.channel import Channel
from libai_data.mesh.peers.node_link import SECONDS_TO_MEET_VARIABLE, seconds_to_meet

SECONDS_UNHEARD = 20
"""A connection over which nothing arrives for so many seconds counts as closed."""

BACKLOG = 4096

_LENGTH = struct.Struct("<Q")
_LONGEST_HEAD = 1 << 24
_LONGEST_INTRODUCTION = 1024
_SECONDS_TO_INTRODUCE_ONESELF = 5.0
_SECONDS_BETWEEN_TRIES = 0.05
Connection = Union[Channel, socket.socket]
Word = tuple[Any, ...]
"""The kind of a word, and its content: JSON values. A tuple may arrive as a list."""

_sending_word = threading.Lock()


def open_network_link() -> tuple[socket.socket, int]:
    """Begin to listen for the leaders of the other nodes; returns the socket and its port."""
    listener = listen(0, BACKLOG)
    keep_from_forks(listener)
    return listener, listener.getsockname()[1]


class Reception:
    """Accepts callers that know the job's key. Each has a thread, so a stranger that sends nothing delays nobody."""

    def __init__(self, listener: socket.socket, key: str) -> None:
        self._listener = listener
        self._key = key
        # Accepted connections, as (what the other end sent as `who`, connection).
        self.came: queue.Queue[tuple[dict[str, Any], socket.socket]] = queue.Queue()
        listener.settimeout(None)
        threading.Thread(target=self._accept, name="reception of other ranks", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:  # closed
                return
            keep_from_forks(link)
            threading.Thread(target=self._greet, args=(link,), name="greeting of a rank", daemon=True).start()

    def _greet(self, link: socket.socket) -> None:
        link.settimeout(_SECONDS_TO_INTRODUCE_ONESELF)
        challenge = secrets.token_hex(16)
        try:
            send_head(link, {"challenge": challenge})
            head = receive_head(link, _LONGEST_INTRODUCTION)
            expected = proof(self._key, "caller", challenge, head["challenge"], head["who"])
            if not hmac.compare_digest(str(head["proof"]).encode(), expected.encode()):
                raise PeerError("a stranger")
            send_head(link, {"proof": proof(self._key, "listener", challenge, head["challenge"])})
        except (OSError, EOFError, ValueError, LookupError, AttributeError, TypeError):
            link.close()
            return
        link.settimeout(None)
        self.came.put((head["who"], link))

    def close(self) -> None:
        """Accept no more connections."""
        # Closing the listener does not wake the thread that accepts.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def introduce(link: socket.socket, who: dict[str, Any], key: str, seconds: float) -> None:
    """Send `who` to a `Reception`, and raise PeerError unless it proves within `seconds` that it is of this job."""
    own = secrets.token_hex(16)
    try:
        link.settimeout(max(seconds, 0.1))
        challenge = receive_head(link, _LONGEST_INTRODUCTION)["challenge"]
        send_head(link, {"who": who, "challenge": own, "proof": proof(key, "caller", challenge, own, who)})
        answer = receive_head(link, _LONGEST_INTRODUCTION)["proof"]
        known = hmac.compare_digest(str(answer).encode(), proof(key, "listener", challenge, own).encode())
    except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
        raise PeerError(f"the program that listens there does not answer as a rank of this job ({error!r})") from error
    if not known:
        raise PeerError("the program that listens there does not have the key of this job")
    link.settimeout(None)


def accept_leaders(listener: socket.socket, nodes: Sequence[int], secret: str) -> dict[int, socket.socket]:
    """Wait `seconds_to_meet()` for the leaders of these nodes; returns a socket for each node, or raises PeerError."""
    links: dict[int, socket.socket] = {}
    seconds = seconds_to_meet()
    deadline = time.monotonic() + seconds
    reception = Reception(listener, secret)
    try:
        while len(links) < len(nodes):
            try:
                who, link = reception.came.get(timeout=max(0.001, deadline - time.monotonic()))
            except queue.Empty:
                missing = sorted(set(nodes) - set(links))
                raise PeerError(
                    f"nodes {missing} did not connect to rank 0 within {seconds:g} s; {SECONDS_TO_MEET_VARIABLE} sets "
                    "how long to wait"
                ) from None
            node = int(who["node"])
            if node not in nodes or node in links:
                link.close()
                continue
            _notice_death(link)
            links[node] = link
    finally:
        reception.close()
    return links


def connect_to_rank0(host: str, port: int, node: int, secret: str) -> socket.socket:
    """Connect a node's leader to rank 0 at `host` and `port` within `seconds_to_meet()`, or raise PeerError."""
    deadline = time.monotonic() + seconds_to_meet()
    while True:
        try:
            link = socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic()))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerError(
                    f"node {node} cannot reach rank 0 at {host}, port {port}: {error}. Data is sent over ports that "
                    "the system chooses; allow them between the nodes, or use readers=node"
                ) from error
            time.sleep(_SECONDS_BETWEEN_TRIES)
    keep_from_forks(link)
    introduce(link, {"node": node}, secret, deadline - time.monotonic())
    _notice_death(link)
    return link


def _notice_death(link: socket.socket) -> None:
    """Let the system close the connection if the other machine, or the network to it, fails."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SECONDS_UNHEARD // 2)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SECONDS_UNHEARD // 4)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SECONDS_UNHEARD * 1000)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def send_head(link: socket.socket, head: dict[str, Any]) -> None:
    """Send a message as JSON. Raises OSError if the other end is gone."""
    packed = json.dumps(head).encode()
    link.sendall(_LENGTH.pack(len(packed)) + packed)


def receive_head(link: socket.socket, longest: int = _LONGEST_HEAD) -> dict[str, Any]:
    """Wait for a message of `send_head`.

    Raises OSError if the other end is gone, EOFError if it has closed, PeerError if the message would be too long.
    """
    length = _LENGTH.unpack(receive_exactly(link, memoryview(bytearray(_LENGTH.size))))[0]
    if length > longest:
        raise PeerError(f"a message of {length} bytes was announced; the other end is no rank of this job")
    head: dict[str, Any] = json.loads(bytes(receive_exactly(link, memoryview(bytearray(length)))))
    return head


def receive_exactly(link: socket.socket, target: memoryview) -> memoryview:
    """Fill `target` and return it. Raises OSError if the other end is gone, EOFError if it has closed."""
    received = 0
    while received < len(target):
        count = link.recv_into(target[received:])
        if not count:
            raise EOFError("the other end is closed")
        received += count
    return target


def send_word(connection: Connection, *word: Any) -> None:
    """Send a word to a rank of this or another node; do nothing if the rank is gone."""
    with suppress(OSError), _sending_word:
        if isinstance(connection, Channel):
            connection.send(word)
        else:
            send_head(connection, {"word": word})


def receive_word(connection: Connection) -> Word:
    """Wait for a word of `send_word`; returns () if the other end is gone."""
    try:
        return tuple(connection.receive() if isinstance(connection, Channel) else receive_head(connection)["word"])
    except (OSError, EOFError, ValueError, LookupError, PeerError):
        return ()
