"""Ranks of a node find each other, whoever else knocks, and a dead one's connection closes whatever it forked."""

from __future__ import annotations

import os
import secrets
import select
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from libai_data.errors import PeerError
from libai_data.mesh.peers.channel import Channel
from libai_data.mesh.peers.links import (
    SECONDS_TO_MEET_VARIABLE,
    accept_followers,
    connect_to_leader,
    let_in,
    open_node_link,
)
from tests.deadline import stretched
from tests.forks import a_fork_that_lives_on


@pytest.fixture
def name() -> str:
    return secrets.token_hex(8)


def meet(name: str, ranks: list[int]) -> dict[int, dict[int, Channel]]:
    listener = open_node_link(name)
    with ThreadPoolExecutor(len(ranks)) as threads:
        coming = {rank: threads.submit(connect_to_leader, name, rank, leader=4) for rank in ranks}
        channels = accept_followers(listener, ranks)
        return {0: channels, 1: {rank: each.result() for rank, each in coming.items()}}


def test_each_rank_is_known_by_its_number(name: str) -> None:
    ours, theirs = meet(name, [5, 6, 7]).values()
    for rank, channel in ours.items():
        channel.send(f"to {rank}")
    for rank, channel in theirs.items():
        assert channel.receive() == f"to {rank}"


def test_who_does_not_say_a_rank_of_this_node_is_turned_away(name: str) -> None:
    listener = open_node_link(name)
    strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
    for stranger in strangers:
        stranger.connect(f"\0libai_data/{name}")
    strangers[0].close()
    Channel(strangers[1]).send(9)
    Channel(strangers[2]).send("five")
    end = connect_to_leader(name, 5, leader=4)
    assert list(accept_followers(listener, [5])) == [5]
    end.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
def test_another_users_process_neither_gets_in_nor_is_taken_for_the_leader(name: str) -> None:
    """Names of Unix sockets can be read, and taken, by every user."""
    listener = open_node_link(name)

    def squat_and_intrude() -> tuple[socket.socket, ...]:
        os.setuid(65534)
        squatter, intruder = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
        squatter.bind(f"\0libai_data/{name} squatted")
        squatter.listen()
        intruder.connect(f"\0libai_data/{name}")
        Channel(intruder).send(5)
        return squatter, intruder

    with a_fork_that_lives_on(squat_and_intrude):
        with pytest.raises(PeerError, match="a process of user 65534 listens there"):
            connect_to_leader(f"{name} squatted", 5, leader=4, seconds=0.5)
        rank, _ = let_in(listener.accept()[0])
        assert rank == -1
    listener.close()


def test_ranks_that_never_come_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECONDS_TO_MEET_VARIABLE, "2")
    listener = open_node_link(name)
    end = connect_to_leader(name, 5, leader=4)
    with pytest.raises(PeerError, match=r"ranks \[6, 7\] of this node did not connect to rank 4 within 2 s"):
        accept_followers(listener, [5, 6, 7])
    end.close()


def test_a_leader_that_never_listens_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECONDS_TO_MEET_VARIABLE, "0.3")
    with pytest.raises(PeerError, match=r"rank 5 could not reach rank 4 \(the first of this node\) within 0\.3 s"):
        connect_to_leader(name, 5, leader=4)


def test_what_a_rank_forked_does_not_keep_its_connections_open(name: str) -> None:
    """A worker, or any helper that a dataset forks, may outlive its rank."""
    ours, theirs = meet(name, [5]).values()
    with a_fork_that_lives_on():
        ours[5].close()
        assert select.select([theirs[5]], [], [], stretched(5))[0]
        with pytest.raises(EOFError):
            theirs[5].receive()
