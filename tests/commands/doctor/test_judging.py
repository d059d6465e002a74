"""What is planted into the ranks' facts is what the checks find, with a word on what to do."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.commands.doctor import checks
from libai_data.commands.doctor.meeting import Meeting, answer_until_dismissed, call_rank0, judge_meeting, why_unreached
from libai_data.commands.doctor.rank import JobRank
from libai_data.commands.doctor.reports import OK, RED, WARNING, Finding, Reports, table
from libai_data.errors import PeerError
from libai_data.launch.launcher import free_port
from libai_data.mesh.peers.links import send_head
from tests.deadline import stretched


def reports(facts: dict[str, list[Any]]) -> Reports:
    """Reports of as many ranks as each check has facts."""
    ranks = len(next(iter(facts.values())))
    return Reports(ranks, {rank: {check: each[rank] for check, each in facts.items()} for rank in range(ranks)})


def places(*local_ranks: int) -> list[Any]:
    return [{"local_rank": local_rank, "host": f"host{number}"} for number, local_rank in enumerate(local_ranks)]


def memory_of(needed: int, available: int, free: int = 1 << 33, gpus: int = 0) -> Any:
    return {"needed": needed, "available": available, "free in /dev/shm": free, "GPUs": gpus}


@pytest.mark.parametrize(
    ("own", "state", "words"),
    [
        (memory_of(10, 100), OK, "batches need 20 B per node, 100 B available"),
        (memory_of(30, 100), WARNING, "node 0: batches need 60 B of 100 B available"),
        (memory_of(60, 100), RED, "node 0: batches need 120 B of 100 B available"),
        (memory_of(1, 100, free=64 << 20, gpus=8), WARNING, "node 0: 67.1 MB free in /dev/shm"),
        (memory_of(1, 100, free=64 << 20), OK, "67.1 MB free in /dev/shm"),
    ],
)
def test_memory_is_judged_by_what_the_ranks_of_a_node_need_together(own: Any, state: str, words: str) -> None:
    (found,) = checks.judge_memory(reports({checks.MEMORY: [own, own], checks.PLACE: places(0, 1)}))
    assert found.state == state and words in found.found


def test_what_two_nodes_need_is_not_added_up() -> None:
    own = memory_of(40, 100)
    (found,) = checks.judge_memory(reports({checks.MEMORY: [own, own], checks.PLACE: places(0, 0)}))
    assert found.state == OK


def test_descriptors_are_judged_by_ranks_and_workers() -> None:
    for descriptors, workers, state, words in (
        (None, 0, OK, "any number of descriptors"),
        (258, 0, OK, "at least 258 descriptors"),
        (257, 0, RED, "rank 1 may open 257 descriptors; 2 ranks need about 258"),
        (300, 10, RED, "rank 1 may open 300 descriptors; 2 ranks need about 338"),
    ):
        facts = [{"descriptors": each, "workers": workers} for each in (None, descriptors)]
        (found,) = checks.judge_limits(reports({checks.LIMITS: facts, checks.PLACE: places(0, 1)}))
        assert (found.state, words in found.found, bool(found.advice)) == (state, True, state != OK), found


@pytest.mark.parametrize(
    ("sizes", "local_ranks", "state", "words"),
    [
        ([4, 1, 1], (0, 1, 0, 1), OK, "data 4 x tensor 1 x pipeline 1 on 2 node(s) of 2 (host0, host1, "),
        ([2, 2, 1], (0, 1, 0, 1), OK, "data 2 x tensor 2"),
        ([1, 4, 1], (0, 1, 0, 1), WARNING, "1 tensor-parallel group(s) span nodes"),
        ([4, 1, 1], (0, 1, 2, 0), RED, "the nodes have different numbers of ranks"),
        ([3, 1, 1], (0, 1, 0), RED, "the nodes have different numbers of ranks"),
    ],
)
def test_a_mesh_is_judged_by_the_nodes_that_its_ranks_are_on(
    sizes: list[int], local_ranks: Any, state: str, words: str
) -> None:
    facts = {checks.PLACE: places(*local_ranks), checks.MESH: [{"sizes": sizes}] * len(local_ranks)}
    (found,) = checks.judge_mesh(reports(facts))
    assert found.state == state and words in found.found and bool(found.advice) == (state != OK)


def test_a_node_whose_storage_is_far_slower_is_named() -> None:
    (found,) = checks.judge_storage(reports({checks.STORAGE: [{"samples/s": rate} for rate in (100, 100, 9, 110)]}))
    assert found.state == WARNING and "rank 2 reads 9 samples/s, but 100 samples/s are usual" in found.found
    (found,) = checks.judge_storage(reports({checks.STORAGE: [{"samples/s": rate} for rate in (100, 20)]}))
    assert found.state == OK and "20 samples/s, on the slowest rank" in found.found


def test_who_is_missing_is_told_from_who_is_stuck_and_who_shares_no_secret() -> None:
    some = Reports(5, {0: {}, 4: {"master": {"unreached": "no answer"}}})
    found = judge_meeting(some, {3: "dataset", 4: "limits"}, "node0, port 1")
    assert [each.state for each in found] == [RED] * 3
    assert "rank 1-2 did not reach node0, port 1" in found[0].found
    assert "did not finish 'dataset' on rank 3" in found[1].found
    assert (
        "no answer on rank 4" in found[2].found
        and "allow connections between the nodes at all ports" in found[2].advice
    )
    found = judge_meeting(Reports(2, {0: {}, 1: {}}), {}, "somewhere, port 1", has_secret=False)
    assert [each.state for each in found] == [OK, WARNING]
    assert "LIBAI_DATA_JOB_SECRET" in found[1].advice


def test_memory_that_a_group_may_use_limits_what_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_GROUPS", tmp_path)
    unlimited = checks.available()
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("900\n")
    assert checks.available() > 0.5 * unlimited
    (tmp_path / "memory.max").write_text("1000\n")
    assert checks.available() == 100


class OtherRank:
    """Rank 1 in a thread, with a report and answers of its own."""

    def __init__(self, port: int) -> None:
        self.job = JobRank(1, 0, 2, "127.0.0.1", port)
        self.code = -1
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        link = call_rank0(self.job, stretched(10))
        send_head(link, {"at": "limits"})
        send_head(link, {"report": {"seen": {"x": 1}}})
        self.code = answer_until_dismissed(link, self.job, stretched(10))


def test_ranks_report_answer_and_are_dismissed_with_a_code() -> None:
    port = free_port()
    meeting = Meeting(JobRank(0, 0, 2, "127.0.0.1", port), stretched(10))
    other = OtherRank(port)
    meeting.gather()
    assert meeting.reports == {1: {"seen": {"x": 1}}} and meeting.last_words == {1: "limits"}
    assert meeting.unreached_ports([1]) == {}
    meeting.dismiss(3)
    other.thread.join(stretched(10))
    assert other.code == 3


@given(st.sampled_from([OSError(110, "x"), OSError(111, "x"), OSError(113, "No route"), socket.timeout("timed out")]))
def test_each_way_to_fail_is_told_apart(error: OSError) -> None:
    words = why_unreached(error)
    assert ("firewall" in words, "no program listens" in words, "no route" in words).count(True) == 1


def test_who_does_not_know_the_jobs_secret_is_no_rank() -> None:
    port = free_port()
    meeting = Meeting(JobRank(0, 0, 2, "127.0.0.1", port, "secret"), stretched(10))
    with pytest.raises(PeerError, match="does not answer as a rank of this job"):
        call_rank0(JobRank(1, 0, 2, "127.0.0.1", port, "guessed"), stretched(10))
    link = call_rank0(JobRank(1, 0, 2, "127.0.0.1", port, "secret"), stretched(10))
    assert meeting._reception.came.get(timeout=stretched(10))[0] == {"rank": 1}
    assert meeting._reception.came.empty()
    meeting.dismiss(0)
    link.close()


def test_a_rank_whose_rank_0_is_gone_ends() -> None:
    port = free_port()
    meeting = Meeting(JobRank(0, 0, 2, "127.0.0.1", port), stretched(10))
    ours = call_rank0(JobRank(1, 0, 2, "127.0.0.1", port), stretched(10))
    meeting._let_in(*meeting._reception.came.get(timeout=stretched(10)))
    meeting.links[1].close()
    with pytest.raises(PeerError, match="rank 0 is gone; see its output"):
        answer_until_dismissed(ours, JobRank(1, 0, 2, "127.0.0.1", port), stretched(5))
    meeting.dismiss(0)
    ours.close()


def test_the_table_ends_with_what_to_do() -> None:
    lines = table([("mesh", Finding(OK, "fine")), ("limits", Finding(RED, "few", "raise them"))])
    assert lines[0].split() == ["check", "found"] and lines[-1] == "RED limits: raise them"
    assert len({line.index(word) for line, word in zip(lines[2:4], ("fine", "few"))}) == 1
