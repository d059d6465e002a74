"""The link between nodes: TCP connections from the leader of each node to rank 0.

Messages are JSON, so that nothing that comes over the network is ever executed; a shared secret keeps strangers out.
"""

from __future__ import annotations

import hmac
import json
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from libai_data.errors import PeerError
from libai_data.global_batch.node_link import SECONDS_TO_MEET_VARIABLE, keep_from_forks, seconds_to_meet

SECONDS_UNHEARD = 20
"""After these, a connection over which nothing comes any more counts as closed."""

_LENGTH = struct.Struct("<Q")
_LONGEST_HEAD = 1 << 24
_LONGEST_INTRODUCTION = 1024
_SECONDS_TO_INTRODUCE_ONESELF = 5.0
_SECONDS_BETWEEN_TRIES = 0.05


def open_network_link() -> tuple[socket.socket, int]:
    """Begin to listen for the leaders of the other nodes; returns the socket and its port."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    keep_from_forks(listener)
    listener.bind(("", 0))
    listener.listen(4096)
    return listener, listener.getsockname()[1]


def accept_leaders(listener: socket.socket, nodes: Sequence[int], secret: str) -> dict[int, socket.socket]:
    """Wait until the leaders of these nodes have connected.

    Args:
        listener: of `open_network_link`; closed afterwards.
        nodes: all but the first.
        secret: known to the ranks of this job alone.

    Raises:
        PeerError: Some did not come in time; they are named.
    """
    links: dict[int, socket.socket] = {}
    seconds = seconds_to_meet()
    deadline = time.monotonic() + seconds
    with listener:
        while len(links) < len(nodes):
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                link, _ = listener.accept()
            except socket.timeout as error:
                missing = sorted(set(nodes) - set(links))
                raise PeerError(
                    f"nodes {missing} did not connect to rank 0 within {seconds:g} s; {SECONDS_TO_MEET_VARIABLE} sets "
                    "how long to wait"
                ) from error
            node = _node_of(link, secret)
            if node not in nodes:
                link.close()
                continue
            keep_from_forks(link)
            _notice_death(link)
            links[node] = link
    return links


def _node_of(link: socket.socket, secret: str) -> int:
    """Which node's leader a newcomer is; -1 for a stranger, whatever it says or does not say."""
    link.settimeout(_SECONDS_TO_INTRODUCE_ONESELF)
    try:
        head = receive_head(link, _LONGEST_INTRODUCTION)
        known = hmac.compare_digest(str(head.get("secret")).encode(), secret.encode())
        node = int(head["node"]) if known else -1
    except (OSError, EOFError, ValueError, LookupError, AttributeError, TypeError, PeerError):
        return -1
    link.settimeout(None)
    return node


def connect_to_rank0(host: str, port: int, node: int, secret: str) -> socket.socket:
    """Connect a node's leader to rank 0.

    Args:
        host: MASTER_ADDR, as the launcher gave it to all nodes.
        port: where rank 0 listens.
        node: this one.
        secret: as in `accept_leaders`.

    Raises:
        PeerError: Rank 0 cannot be reached.
    """
    deadline = time.monotonic() + seconds_to_meet()
    while True:
        try:
            link = socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic()))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerError(
                    f"node {node} cannot reach rank 0 at {host}, port {port}: {error}. Data comes over ports that the "
                    "system chooses; allow them between the nodes, or use readers=node"
                ) from error
            time.sleep(_SECONDS_BETWEEN_TRIES)
    link.settimeout(None)
    keep_from_forks(link)
    _notice_death(link)
    send_head(link, {"secret": secret, "node": node})
    return link


def _notice_death(link: socket.socket) -> None:
    """Let the system find out when the other machine, or the way to it, is gone."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SECONDS_UNHEARD // 2)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SECONDS_UNHEARD // 4)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SECONDS_UNHEARD * 1000)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def send_head(link: socket.socket, head: dict[str, Any]) -> None:
    """Send a message that JSON can express.

    Raises:
        OSError: The other end is gone.
    """
    packed = json.dumps(head).encode()
    link.sendall(_LENGTH.pack(len(packed)) + packed)


def receive_head(link: socket.socket, longest: int = _LONGEST_HEAD) -> dict[str, Any]:
    """Wait for a message of `send_head`.

    Raises:
        OSError: The other end is gone.
        EOFError: It has closed the connection.
        PeerError: The message would be longer than `longest` bytes.
    """
    length = _LENGTH.unpack(receive_exactly(link, memoryview(bytearray(_LENGTH.size))))[0]
    if length > longest:
        raise PeerError(f"a message of {length} bytes was announced; the other end is no rank of this job")
    head: dict[str, Any] = json.loads(bytes(receive_exactly(link, memoryview(bytearray(length)))))
    return head


def receive_exactly(link: socket.socket, target: memoryview) -> memoryview:
    """Wait until `target` is full; returns it.

    Raises:
        OSError: The other end is gone.
        EOFError: It has closed the connection.
    """
    received = 0
    while received < len(target):
        count = link.recv_into(target[received:])
        if not count:
            raise EOFError("the other end is closed")
        received += count
    return target
