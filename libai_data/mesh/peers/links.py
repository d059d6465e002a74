"""The links between ranks: Unix sockets within a node, and TCP connections from the leader of each node to rank 0.

The Unix sockets have abstract addresses. They announce new batches, which are themselves in shared memory.

Messages between nodes are JSON. Only the nesting of a nested batch is sent as a pickle, because the batch may contain
named tuples of the user's classes. Both ends prove that they know a key of the job. The key is never sent. The messages
are neither encrypted nor signed.
"""

from __future__ import annotations

import hmac
import json
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Callable, TypeVar, Union

from libai_data.errors import PeerError
from libai_data.launch.job_environment import proof, seconds_from_environment
from libai_data.launch.parent_pipe import keep_from_forks
from libai_data.launch.ports import listen, process_and_user_of
from libai_data.mesh.peers.channel import Channel

SECONDS_TO_MEET_VARIABLE = "LIBAI_DATA_SECONDS_TO_MEET"
_SECONDS_TO_MEET = 60.0
SECONDS_UNHEARD = 20
"""A connection over which nothing arrives for so many seconds counts as closed."""

BACKLOG = 4096

_LENGTH = struct.Struct("<Q")
_LONGEST_HEAD = 1 << 24
_LONGEST_INTRODUCTION = 1024
_SECONDS_TO_INTRODUCE_ONESELF = 5.0
_SECONDS_BETWEEN_TRIES = 0.02
_MOST_SECONDS_BETWEEN_TRIES = 0.2
Connection = Union[Channel, socket.socket]
_End = TypeVar("_End", Channel, socket.socket)
Word = tuple[Any, ...]
"""The kind of a word, and its content: JSON values. A tuple may arrive as a list."""

_sending_word = threading.Lock()


def seconds_to_meet() -> float:
    """How many seconds ranks wait for each other to connect: LIBAI_DATA_SECONDS_TO_MEET, by default 60."""
    return seconds_from_environment(SECONDS_TO_MEET_VARIABLE, _SECONDS_TO_MEET)


def open_node_link(name: str) -> socket.socket:
    """Listen for the other ranks of this node; an OSError if `name`, which only they have, is in use.

    The name is no secret, as every user can read it in /proc/net/unix. So both ends check who runs the other process.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keep_from_forks(listener)
    listener.bind(_address(name))
    listener.listen(256)
    return listener


def accept_followers(listener: socket.socket, ranks: Sequence[int]) -> dict[int, Channel]:
    """Wait `seconds_to_meet()` for `ranks`, all others of this node; returns their channels, or raises PeerError."""

    def accept(seconds: float) -> tuple[int, Channel]:
        listener.settimeout(seconds)
        return let_in(listener.accept()[0])

    with listener:
        return _all_of(ranks, accept, f"ranks {{}} of this node did not connect to rank {min(ranks, default=1) - 1}")


def let_in(end: socket.socket) -> tuple[int, Channel]:
    """The rank that has connected (-1 if another user runs it, or it does not send its rank), and its channel."""
    channel = Channel(end)
    keep_from_forks(channel)
    # Messages are pickles, which can execute code, so nothing is read from another user's process.
    if user_of(end) != os.getuid():
        return -1, channel
    end.settimeout(_SECONDS_TO_INTRODUCE_ONESELF)
    try:
        rank = channel.receive()
    except (OSError, EOFError):
        return -1, channel
    end.settimeout(None)
    return rank if isinstance(rank, int) else -1, channel


def connect_to_leader(name: str, rank: int, leader: int, seconds: float | None = None) -> Channel:
    """Connect a rank to the first rank of its node, within `seconds`, by default `seconds_to_meet()`; or PeerError."""
    seconds = seconds_to_meet() if seconds is None else seconds
    deadline = time.monotonic() + seconds
    pause = _SECONDS_BETWEEN_TRIES
    while True:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            end.connect(_address(name))
            user = user_of(end)
            if user != os.getuid():
                raise PermissionError(f"a process of user {user} listens there")
            break
        except OSError as error:
            end.close()
            if time.monotonic() > deadline:
                raise PeerError(
                    f"rank {rank} could not reach rank {leader} (the first of this node) within {seconds:g} s: "
                    f"{error}; {SECONDS_TO_MEET_VARIABLE} sets how long to wait"
                ) from error
            time.sleep(pause)
            pause = min(2 * pause, _MOST_SECONDS_BETWEEN_TRIES)
    channel = Channel(end)
    keep_from_forks(channel)
    channel.send(rank)
    return channel


def _address(name: str) -> str:
    return f"\0libai_data/{name}"


def user_of(end: socket.socket) -> int:
    """User id of the process at the other end. Every user of the machine can connect to an abstract address."""
    return process_and_user_of(end)[1]


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
    reception = Reception(listener, secret)

    def accept(seconds: float) -> tuple[int, socket.socket]:
        who, link = reception.came.get(timeout=seconds)
        _notice_death(link)
        return int(who["node"]), link

    try:
        return _all_of(nodes, accept, "nodes {} did not connect to rank 0")
    finally:
        reception.close()


def _all_of(numbers: Sequence[int], accept: Callable[[float], tuple[int, _End]], problem: str) -> dict[int, _End]:
    """Accept a connection of each of these ranks or nodes, within `seconds_to_meet()`.

    Args:
        accept: waits for a connection, for so many seconds; returns the number of the rank or node, and the connection.
        problem: the error, with "{}" for the numbers that are missing.
    """
    found: dict[int, _End] = {}
    seconds = seconds_to_meet()
    deadline = time.monotonic() + seconds
    while len(found) < len(numbers):
        try:
            number, end = accept(max(0.001, deadline - time.monotonic()))
        except (socket.timeout, queue.Empty) as error:
            missing = sorted(set(numbers) - set(found))
            raise PeerError(
                f"{problem.format(missing)} within {seconds:g} s; were they started? {SECONDS_TO_MEET_VARIABLE} sets "
                "how long to wait"
            ) from error
        if number in numbers and number not in found:
            found[number] = end
        else:
            end.close()
    return found


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
