"""Before a collective all ranks meet: a rank reports for its node when all of the node have come, and no earlier."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from libai_data.errors import MeshError
from libai_data.mesh.peers import watchdog
from libai_data.mesh.peers.standstill import COLLECTIVE
from libai_data.mesh.peers.watchdog import Liveness
from tests.deadline import stretched


def leader_of_node_1(monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patched:
        # The test says itself what arrives.
        patched.setattr(threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
        return Liveness(rank=2, world_size=4, num_nodes=2)


def close(leader: Any) -> None:
    links = leader._links
    for descriptor in (links.calls, links._call, links._notes_memory):
        os.close(descriptor)


def test_a_rank_whose_follower_comes_before_it_has_met_rank_0_reports_both_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Any] = []
    leader = leader_of_node_1(monkeypatch)
    monkeypatch.setattr(watchdog, "send_word", lambda connection, *word: sent.append((connection, word)))
    follower, rank0 = object(), object()
    leader._links.connections[1] = follower
    leader._links.above = rank0  # It connects now, and is not among the connections yet.
    place = (1, COLLECTIVE, "synchronize")
    leader._arrive(3, place, "loop.py:7", [[3, "three"]])
    assert not sent
    leader._links.connections[2] = rank0
    leader._arrive(2, place, "loop.py:7", [[2, "two"]])
    assert [connection for connection, _ in sent] == [rank0]
    _, rank, at, _, told = sent[0][1]
    assert (rank, at, dict(told)) == (2, place, {3: "three", 2: "two"})
    close(leader)


def test_a_rank_that_leaves_as_soon_as_it_may_continue_has_been_at_the_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    leader = leader_of_node_1(monkeypatch)
    leader._is_at_meeting, leader._collectives = True, 3
    problems: list[str] = []

    def leave_at_once(connection: object, *word: str) -> None:
        leader._leaving.after[3] = 6
        problems.append(leader._leaving.problem_of(2, leader._collectives, leader._is_at_meeting))

    monkeypatch.setattr(watchdog, "send_word", leave_at_once)
    monkeypatch.setattr(leader._links, "below", lambda: [object()])
    leader._release('[[2, "", null], [3, "", null]]')
    assert problems == [""]
    close(leader)


def test_a_collective_of_another_thread_than_the_main_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, it may get the words of a collective that the main thread begins meanwhile."""
    leader = leader_of_node_1(monkeypatch)
    errors: list[BaseException] = []

    def begin() -> None:
        try:
            leader.begin_collective("a comparison", "words")
        except BaseException as error:
            errors.append(error)

    leader._met = True
    thread = threading.Thread(target=begin, name="reads ahead", daemon=True)
    thread.start()
    thread.join(stretched(10))
    assert isinstance(errors[0], MeshError), "it waits for the other ranks"
    assert "a comparison was begun in the thread 'reads ahead'" in str(errors[0])
    close(leader)
