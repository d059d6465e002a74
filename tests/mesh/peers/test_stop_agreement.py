from __future__ import annotations

import threading
from collections import deque
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from libai_data.mesh.peers.stop_agreement import StopAgreement
from tests.deadline import stretched


class Ranks:
    """A job of nodes with some ranks each; words lie in order in each connection until they are delivered."""

    def __init__(self, nodes: int, per_node: int) -> None:
        self.world = nodes * per_node
        self.connections: list[tuple[int, deque[str]]] = []
        leaders = [node * per_node for node in range(nodes)]
        self.above = [None if r == 0 else 0 if r in leaders else r - r % per_node for r in range(self.world)]
        self.ranks = [StopAgreement() for _ in range(self.world)]
        for rank, above in enumerate(self.above):
            below = [self._connection(other) for other in range(self.world) if self.above[other] == rank]
            self.ranks[rank].connect(None if above is None else self._connection(above), below)

    def _connection(self, to: object) -> partial:
        words: deque[str] = deque()
        assert isinstance(to, int)
        self.connections.append((to, words))
        return partial(words.append)

    def deliver(self, choice: int) -> bool:
        """Deliver the oldest word of some connection; False if none is under way."""
        waiting = [(to, words) for to, words in self.connections if words]
        if waiting:
            to, words = waiting[choice % len(waiting)]
            self.ranks[to].hear(words.popleft())
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
    up: list[str] = []
    rank = StopAgreement()
    rank.connect(up.append, ())
    rank.begin(0)
    assert not rank.reaches(0)
    rank.hear("stop: where")
    assert up == ["stop: in 0"]
    answers: list[bool] = []
    main = threading.Thread(target=lambda: answers.extend([rank.reaches(1), rank.reaches(2)]))
    main.start()
    rank.hear("stop: before 2")
    main.join(stretched(60))
    assert answers == [False, True]


def test_a_signal_to_a_single_rank_stops_before_its_next_step() -> None:
    rank = StopAgreement()
    rank.begin(4)
    assert not rank.reaches(4)
    rank.ask()
    assert rank.reaches(5)
    # A later training of the process is asked anew.
    rank.begin(0)
    assert not rank.reaches(5)
    rank.ask()
    assert rank.reaches(6)
