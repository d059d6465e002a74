"""The link between the ranks of one node: Unix sockets without a place in the file system, for news of batches.

The batches themselves lie in shared memory.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Dict, Sequence

from libai_data.errors import PeerError
from libai_data.loader.channel import Channel

_SECONDS_TO_MEET = 60.0
_SECONDS_BETWEEN_TRIES = 0.02
_CREDENTIALS = struct.Struct("3i")


def open_node_link(name: str) -> socket.socket:
    """Begin to listen for the other ranks of this node.

    Args:
        name: known to the ranks of this job alone.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(_address(name))
    listener.listen(256)
    return listener


def accept_followers(listener: socket.socket, ranks: Sequence[int]) -> Dict[int, Channel]:
    """Wait until these ranks have connected.

    Args:
        listener: of `open_node_link`; closed afterwards.
        ranks: of this node, without the leader.

    Raises:
        PeerError: Some did not come in time; they are named.
    """
    channels: Dict[int, Channel] = {}
    deadline = time.monotonic() + _SECONDS_TO_MEET
    with listener:
        while len(channels) < len(ranks):
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                end, _ = listener.accept()
            except socket.timeout as error:
                missing = sorted(set(ranks) - set(channels))
                raise PeerError(
                    f"ranks {missing} of this node did not connect to rank {min(ranks) - 1} within "
                    f"{_SECONDS_TO_MEET:.0f} s; were they started?"
                ) from error
            end.settimeout(None)
            if _user_of(end) != os.getuid():
                end.close()
                continue
            channel = Channel(end)
            channels[channel.receive()] = channel
    return channels


def connect_to_leader(name: str, rank: int, leader: int) -> Channel:
    """Connect to the rank that hands out batches on this node.

    Args:
        name: as in `open_node_link`.
        rank: this one.
        leader: named in the error.

    Raises:
        PeerError: It did not listen in time.
    """
    deadline = time.monotonic() + _SECONDS_TO_MEET
    while True:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            end.connect(_address(name))
            break
        except OSError as error:
            end.close()
            if time.monotonic() > deadline:
                raise PeerError(
                    f"rank {rank} could not reach rank {leader}, which reads for this node, within "
                    f"{_SECONDS_TO_MEET:.0f} s: {error}"
                ) from error
            time.sleep(_SECONDS_BETWEEN_TRIES)
    channel = Channel(end)
    channel.send(rank)
    return channel


def _address(name: str) -> str:
    return f"\0libai_data/{name}"


def _user_of(end: socket.socket) -> int:
    """User id of the process at the other end; an abstract address is open to every user of the machine."""
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
