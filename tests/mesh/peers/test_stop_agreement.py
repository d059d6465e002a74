from __future__ import annotations

from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from libai_data.mesh.peers.stop_agreement import StopAgreement
from tests.deadline import stretched


class Ranks:
    """A job of nodes with some ranks each; words lie in order in each connection until they are delivered."""

    def __init__(self, nodes: int, per_node: int) -> None:
        self.world = nodes * per_node
        leaders = [node * per_node for node in range(nodes)]
        self.above = [0 if r in leaders else r - r % per_node for r in range(self.world)]
        self.connections: dict[tuple[int, int], deque[tuple[str, int]]] = defaultdict(deque)
        self.ranks = [
            StopAgreement(self.world, partial(self.to_rank0, rank), partial(self.to_all, rank))
            for rank in range(self.world)
        ]

    def to_rank0(self, rank: int, *word: Any) -> None:
        if rank == 0:
            self.ranks[0].hear(*word)
        else:
            self.connections[rank, self.above[rank]].append(word)

    def to_all(self, rank: int, *word: Any) -> None:
        for other in range(1, self.world):
            if self.above[other] == rank:
                self.connections[rank, other].append(word)
        self.ranks[rank].hear(*word)

    def deliver(self, choice: int) -> bool:
        """Deliver the oldest word of some connection; False if none is under way."""
        waiting = [connection for connection, words in self.connections.items() if words]
        if waiting:
            sender, to = connection = waiting[choice % len(waiting)]
            word = self.connections[connection].popleft()
            if sender == self.above[to]:
                self.to_all(to, *word)
            else:
                self.to_rank0(to, *word)
        return bool(waiting)

    def may_begin(self, rank: int) -> bool:
        """Whether `reaches` would answer at once."""
        agreement = self.ranks[rank]
        return not agreement._held or agreement._stop_before is not None


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from(["step", "ask", "deliver"]), st.integers(0, 100)), max_size=60),
    st.integers(0, 5),
)
def test_all_ranks_stop_before_the_same_step_wherever_they_are(
    nodes: int, per_node: int, events: list[tuple[str, int]], start: int
) -> None:
    job = Ranks(nodes, per_node)
    begun = [start - 1] * job.world
    stopped: list[int] = [-1] * job.world
    for agreement in job.ranks:
        agreement.begin(start)

    def step(rank: int) -> None:
        if stopped[rank] < 0 and job.may_begin(rank):
            if job.ranks[rank].reaches(begun[rank] + 1):
                stopped[rank] = begun[rank] + 1
            else:
                begun[rank] += 1

    for event, choice in events:
        if event == "step":
            step(choice % job.world)
        elif event == "ask":
            job.ranks[choice % job.world].ask()
        else:
            job.deliver(choice)
    assert all(at == -1 for at in stopped) or any(event == "ask" for event, _ in events)
    job.ranks[events[0][1] % job.world if events else 0].ask()
    while job.deliver(0):
        pass
    for _ in range(200):
        for rank in range(job.world):
            step(rank)
    assert len(set(stopped)) == 1
    # As soon as it can be: before the first step that nobody had begun.
    assert stopped[0] == max(begun) + 1


def test_a_rank_between_two_steps_waits_for_the_answer_and_no_longer() -> None:
    up: list[tuple[str, int]] = []
    rank = StopAgreement(2, lambda *word: up.append(word), lambda *word: None)
    rank.begin(0)
    assert not rank.reaches(0)
    rank.hear("where", 0)
    assert up == [("in", 0)]
    with ThreadPoolExecutor(1) as threads:
        answers = threads.submit(lambda: [rank.reaches(1), rank.reaches(2)])
        rank.hear("before", 2)
        assert answers.result(stretched(60)) == [False, True]


def test_a_signal_to_a_single_rank_stops_before_its_next_step() -> None:
    rank = Ranks(1, 1).ranks[0]
    rank.begin(4)
    assert not rank.reaches(4)
    rank.ask()
    assert rank.reaches(5)
    # A later training of the process is asked anew.
    rank.begin(0)
    assert not rank.reaches(5)
    rank.ask()
    assert rank.reaches(6)
