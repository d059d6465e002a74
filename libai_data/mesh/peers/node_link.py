"""The link between the ranks of one node: abstract Unix sockets, which announce new batches.

The batches themselves are in shared memory.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence

from libai_data.errors import PeerError
from libai_data.launch.job_environment import seconds_from_environment
from libai_data.launch.parent_pipe import keep_from_forks
from libai_data.launch.ports import process_and_user_of
from libai_data.mesh.peers.channel import Channel

SECONDS_TO_MEET_VARIABLE = "LIBAI_DATA_SECONDS_TO_MEET"
_SECONDS_TO_MEET = 60.0
_SECONDS_TO_INTRODUCE_ONESELF = 5.0
_SECONDS_BETWEEN_TRIES = 0.02
_MOST_SECONDS_BETWEEN_TRIES = 0.2


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
    channels: dict[int, Channel] = {}
    seconds = seconds_to_meet()
    deadline = time.monotonic() + seconds
    with listener:
        while len(channels) < len(ranks):
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                end, _ = listener.accept()
            except socket.timeout as error:
                missing = sorted(set(ranks) - set(channels))
                raise PeerError(
                    f"ranks {missing} of this node did not connect to rank {min(ranks) - 1} within {seconds:g} s; "
                    f"were they started? {SECONDS_TO_MEET_VARIABLE} sets how long to wait"
                ) from error
            rank, channel = let_in(end)
            if rank in ranks and rank not in channels:
                channels[rank] = channel
            else:
                channel.close()
    return channels


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
