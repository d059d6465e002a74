"""Batches between nodes: each node gets its own rows, ahead of need; nobody waits for who has left, failed or died."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, Callable

import numpy as np
import pytest

from libai_data.delivery.feeds import NodeBatch
from libai_data.delivery.network import NetworkFeed, NetworkPublisher
from libai_data.delivery.shared_loader import _hang_up
from libai_data.errors import PeerError, SampleError
from libai_data.loader.arena import Arena
from libai_data.loader.schema import Layout
from libai_data.mesh.peers import links
from libai_data.mesh.peers.links import (
    SECONDS_TO_MEET_VARIABLE,
    Reception,
    accept_leaders,
    connect_to_rank0,
    introduce,
    open_network_link,
    receive_head,
    send_head,
)
from libai_data.structures import BatchInfo
from tests.deadline import stretched, wait_until

SHARDS = 4
ROWS = 3
SECRET = "of this job"


def batch(number: int, length: int = 5, **fields: np.ndarray) -> NodeBatch:
    """A batch of 12 rows whose values name shard, row and batch."""
    rows = np.arange(SHARDS * ROWS)
    arrays: dict[str, Any] = {
        "x": (rows[:, None] * 1000 + number + np.zeros(length)).astype(np.float32),
        "label": rows + number,
        **fields,
    }
    layouts = {name: Layout() for name in arrays}
    layouts["label"] = Layout(("split_0", "broadcast"), -1)
    return NodeBatch(BatchInfo(number, 0, 12 * number, 12, 12, (number, 1)), None, arrays, layouts, None, (0, 0), ())


def meet(strangers: Callable[[int], None] = lambda port: None) -> tuple[socket.socket, socket.socket]:
    """Rank 0's end and node 1's of a connection that they make after strangers have come to rank 0's port."""
    listener, port = open_network_link()
    strangers(port)
    with ThreadPoolExecutor(1) as threads:
        coming = threads.submit(connect_to_rank0, "127.0.0.1", port, 1, SECRET)
        return accept_leaders(listener, [1], SECRET)[1], coming.result()


class Link:
    """Rank 0's end and that of node 1, which has shards 1 and 3, over TCP."""

    def __init__(self, ahead: int = 2, is_sent: Callable[[int], bool] = lambda placement_idx: True) -> None:
        self.rank0_end, self.node_end = meet()
        plan: Any = SimpleNamespace(
            mesh=SimpleNamespace(data_parallel_size=SHARDS),
            shards_of_node=lambda node: (1, 3),
            is_sent_to=lambda node, placement_idx: is_sent(placement_idx),
        )
        self.publisher = NetworkPublisher(self.rank0_end, 1, plan, ahead)
        self.arena = Arena()
        self.feed = NetworkFeed(self.node_end, self.arena, ahead)
        self.begin()

    def begin(self) -> None:
        self.publisher.begin()
        self.feed.begin(0)

    def close(self) -> None:
        self.feed.close()
        self.publisher.close()
        self.arena.close()


@pytest.fixture
def link() -> Iterator[Link]:
    made = Link()
    yield made
    made.close()


def ends_within(seconds: float, thread: threading.Thread) -> bool:
    thread.join(seconds)
    return not thread.is_alive()


def publishing(link: Link, batches: int, big: np.ndarray) -> threading.Thread:
    """A thread that publishes batches for as long as it may."""

    def publish() -> None:
        for number in range(batches):
            link.publisher.publish(batch(number, big=big))

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    return thread


def taken(link: Link) -> NodeBatch:
    got = link.feed.next()
    assert got is not None
    return got


def own_rows(array: np.ndarray) -> list[Any]:
    return np.concatenate([array[ROWS : 2 * ROWS], array[3 * ROWS :]]).tolist()


def test_a_node_gets_its_own_rows_in_order(link: Link) -> None:
    for number in range(20):
        sent = batch(number, length=number % 4)
        link.publisher.publish(sent)
        got = taken(link)
        assert got.info == sent.info
        assert got.layouts == sent.layouts
        assert list(got.arrays) == list(sent.arrays)
        for name, array in sent.arrays.items():
            assert got.arrays[name].dtype == array.dtype
            assert got.arrays[name].tolist() == own_rows(array)


def bytes_received(end: socket.socket) -> int:
    """What a TCP connection has received: tcpi_bytes_received, 64 bits at this place of Linux's tcp_info."""
    return int.from_bytes(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)[128:136], "little")


@pytest.mark.parametrize(("stages", "most", "least"), [((0, -1), 700_000, 590_000), ((-1,), 4_000, 0)])
def test_what_only_other_stages_need_is_not_sent(stages: tuple[int, ...], most: int, least: int) -> None:
    """Counted by the system: of a megabyte for the first stage, nothing reaches a node that has only the last one."""
    link = Link(is_sent=lambda placement_idx: placement_idx in stages)
    for number in range(3):  # The memory of the one before is used again.
        link.publisher.publish(batch(number, big=np.ones((12, 100_000 // 3), np.uint8)))
        got = taken(link)
        assert got.arrays["label"].tolist() == own_rows(np.arange(12) + number)
        assert got.arrays["big"].shape == (6, 100_000 // 3)
        assert got.arrays["big"].max() == (0 in stages)
        del got
    assert least < bytes_received(link.node_end) < most
    link.close()


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64"])
def test_every_dtype_crosses_as_it_is(link: Link, dtype: str) -> None:
    values = np.arange(48).reshape(12, 2, 2).astype(dtype)
    link.publisher.publish(batch(0, values=values, none=np.zeros((12, 0, 4), dtype), numbers=values[:, 0, 0]))
    got = taken(link)
    assert got.arrays["values"].dtype == np.dtype(dtype)
    assert got.arrays["values"].tolist() == own_rows(values)
    assert got.arrays["none"].shape == (6, 0, 4)
    assert got.arrays["numbers"].tolist() == own_rows(values[:, 0, 0])


def test_the_end_of_a_pass_and_a_broken_off_one_are_told_apart(link: Link) -> None:
    link.publisher.publish(batch(0))
    link.publisher.publish(batch(1))
    link.begin()
    link.publisher.publish(batch(7))
    assert taken(link).info.step == 7
    link.publisher.end()
    assert link.feed.next() is None


def test_batches_arrive_ahead_of_need(link: Link) -> None:
    link.publisher.publish(batch(0))
    got: list[NodeBatch | None] = [None]

    def has_come() -> bool:
        got[0] = link.feed.next_if_ready()
        return got[0] is not None

    wait_until(has_come, "batch")
    assert link.feed.next_if_ready() is None


def test_rank_0_waits_for_a_node_that_is_far_behind(link: Link) -> None:
    big = np.zeros((12, 1 << 20), np.uint8)
    published: list[int] = []

    def lead() -> None:
        for number in range(20):
            link.publisher.publish(batch(number, big=big))
            published.append(number)

    leader = threading.Thread(target=lead)
    leader.start()
    leader.join(1.0)
    assert len(published) < 12
    for number in range(20):
        assert taken(link).info.step == number
    assert ends_within(60, leader)


def test_memory_and_kept_batches_are_bounded(link: Link) -> None:
    for number in range(200):
        link.publisher.publish(batch(number))
        taken(link)
    assert os.fstat(link.arena.descriptor).st_size <= 9 * os.sysconf("SC_PAGE_SIZE")


def test_a_kept_batch_stays_as_it_is(link: Link) -> None:
    kept = []
    for number in range(12):
        sent = batch(number)
        link.publisher.publish(sent)
        kept.append((link.feed.next(), own_rows(sent.arrays["x"])))
    for got, expected in kept:
        assert got is not None
        assert got.arrays["x"].tolist() == expected


def test_a_node_is_told_why_reading_failed(link: Link) -> None:
    link.publisher.publish(batch(0))
    link.publisher.fail(SampleError("sample 7 is broken"))
    taken(link)
    with pytest.raises(PeerError, match="rank 0, which reads for all, failed: SampleError: sample 7 is broken"):
        link.feed.next()


def test_saying_why_reading_failed_waits_for_nobody_for_long() -> None:
    link = Link()
    big = np.zeros((12, 4 << 20), np.uint8)
    # Fill what is under way, until rank 0 would have to wait.
    assert not ends_within(1.0, publishing(link, 9, big))
    failing = threading.Thread(target=link.publisher.fail, args=(SampleError("sample 7 is broken"),), daemon=True)
    failing.start()
    assert ends_within(60, failing)
    link.close()


def test_a_node_that_takes_its_leave_is_not_missed(link: Link) -> None:
    link.publisher.publish(batch(0))
    taken(link)
    link.publisher.publish(batch(1))
    link.feed.close()
    for number in range(2, 40):
        link.publisher.publish(batch(number))


def test_a_node_that_dies_is_named(link: Link) -> None:
    link.node_end.shutdown(socket.SHUT_RDWR)
    with pytest.raises(PeerError, match="node 1 is gone"):
        for number in range(1000):
            link.publisher.publish(batch(number))


def test_a_rank_0_that_dies_is_named_each_time_one_asks(link: Link) -> None:
    link.publisher.publish(batch(0))
    taken(link)
    link.rank0_end.shutdown(socket.SHUT_RDWR)
    for _ in range(2):
        with pytest.raises(PeerError, match="rank 0, which reads for all, sends no more batches"):
            link.feed.next()


def test_rubbish_from_rank_0_ends_the_pass_instead_of_waiting(link: Link) -> None:
    send_head(link.rank0_end, {"no": "kind"})
    with pytest.raises(PeerError, match="rank 0"):
        link.feed.next()


def test_closing_sends_what_is_still_needed(link: Link) -> None:
    for number in range(3):
        link.publisher.publish(batch(number))
    closing = threading.Thread(target=link.publisher.close)
    closing.start()
    for number in range(3):
        assert taken(link).info.step == number
    assert ends_within(60, closing)


def test_what_other_ranks_have_yet_to_take_is_not_written_over_while_a_loader_closes(link: Link) -> None:
    """Nothing is let go of before the thread that receives has ended; it would fill the memory with the next batch."""

    class Publisher:
        def close(self, untaken: int) -> None:
            assert not link.feed._thread.is_alive()
            closed.append(untaken)

    closed: list[int] = []
    publisher: Any = Publisher()
    publishing(link, 20, np.zeros((12, 1000)))
    _hang_up(link.feed, [publisher], deque([None]))
    assert closed == [1]


def test_closing_waits_for_no_batch_that_nobody_will_take() -> None:
    link = Link()
    big = np.zeros((12, 4 << 20), np.uint8)
    link.publisher.publish(batch(0, big=big))
    taken(link)
    assert not ends_within(1.0, publishing(link, 9, big))
    # Both sides close, in either order, while the queues on the way are full.
    closing = threading.Thread(target=link.publisher.close, args=(9,))
    closing.start()
    link.feed.close()
    assert ends_within(60, closing)
    link.arena.close()


def test_a_feed_that_another_thread_closes_waits_no_longer(link: Link) -> None:
    with ThreadPoolExecutor(1) as threads, pytest.raises(PeerError, match="this rank has closed the connection"):
        waiting = threads.submit(link.feed.next)
        wait_until(lambda: bool(link.feed._received.not_empty._waiters), "thread that waits")  # type: ignore[attr-defined]
        link.feed.close()
        waiting.result(stretched(10))


def test_a_feed_that_the_garbage_collector_closes_in_its_own_thread_ends(link: Link) -> None:
    acquire = link.feed._slot_list.acquire

    def close_and_acquire(size: int) -> Any:
        link.feed.close()
        return acquire(size)

    link.feed._slot_list.acquire = close_and_acquire  # type: ignore[method-assign]
    link.publisher.publish(batch(0))
    assert ends_within(stretched(10), link.feed._thread)


def test_a_publisher_that_the_garbage_collector_closes_in_its_own_thread_ends(link: Link) -> None:
    closed = threading.Event()

    def close(*_: Any) -> None:
        link.publisher.close()
        closed.set()

    setattr(link.publisher, "_send", close)  # noqa: B010
    link.publisher.publish(batch(0))
    assert closed.wait(stretched(10))
    assert ends_within(stretched(10), link.publisher._thread)


def test_no_thread_outlives_its_link() -> None:
    before = set(threading.enumerate())
    for closes_first in ("feed", "publisher"):
        link = Link()
        link.publisher.publish(batch(0))
        (link.feed if closes_first == "feed" else link.publisher).close()
        link.close()
    # Others may begin threads of their own meanwhile, as what runs the tests does.
    left = {thread.name for thread in threading.enumerate() if thread not in before}
    assert not left & {"send to node 1", "receive from rank 0"}


def test_strangers_at_the_door_are_turned_away_and_keep_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[socket.socket] = []

    def strangers(port: int) -> None:
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x05\0\0\0\0\0\0\0[1,2]", b"\x02\0\0\0\0\0\0\0{}", b"\xff" * 40):
            end = socket.create_connection(("127.0.0.1", port))
            end.sendall(said)
            end.close()
        for head in ({"who": {"node": 1}, "challenge": "", "proof": "guéssed"}, {"who": {"node": 1}}, {"proof": 1}):
            held.append(socket.create_connection(("127.0.0.1", port)))
            send_head(held[-1], head)
        held.extend(socket.create_connection(("127.0.0.1", port)) for _ in range(20))  # silent

    # Who waits for a stranger waits longer than for the node, and names it as missing.
    monkeypatch.setattr(links, "_SECONDS_TO_INTRODUCE_ONESELF", 1000.0)
    ours, theirs = meet(strangers)
    send_head(ours, {"hello": 1})
    assert receive_head(theirs) == {"hello": 1}
    for each in [*held, ours, theirs]:
        each.close()


def test_the_key_never_crosses_the_network_and_both_ends_must_know_it() -> None:
    """A relay between the ends keeps what they say; then each end is played by one who does not know the key."""
    listener, port = open_network_link()
    reception = Reception(listener, SECRET)
    relayed = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as relay:
        caller = socket.create_connection(relay.getsockname())
        theirs, _ = relay.accept()
        ours = socket.create_connection(("127.0.0.1", port))

        def pass_on(source: socket.socket, target: socket.socket) -> None:
            while said := source.recv(4096):
                relayed.extend(said)
                target.sendall(said)

        for ends in ((theirs, ours), (ours, theirs)):
            threading.Thread(target=pass_on, args=ends, daemon=True).start()
        introduce(caller, {"rank": 3}, SECRET, 60)
    who, _ = reception.came.get(timeout=60)
    assert who == {"rank": 3}
    assert len(relayed) > 100
    assert SECRET.encode() not in relayed
    stranger = socket.create_connection(("127.0.0.1", port))
    with pytest.raises(PeerError, match="does not answer as a rank of this job"):
        introduce(stranger, {"rank": 3}, "guessed", 60)
    # Somebody who listens in the place of rank 0.
    with socket.create_server(("127.0.0.1", 0)) as fake:
        caller = socket.create_connection(fake.getsockname())
        impostor, _ = fake.accept()
        send_head(impostor, {"challenge": "0" * 32})
        send_head(impostor, {"proof": "0" * 64})
        with pytest.raises(PeerError, match="does not have the key of this job"):
            introduce(caller, {"rank": 3}, SECRET, 60)
    reception.close()


def test_a_node_that_never_comes_and_an_unreachable_rank_0_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECONDS_TO_MEET_VARIABLE, "0.3")
    listener, _ = open_network_link()
    with pytest.raises(PeerError, match=r"nodes \[1, 2\] did not connect to rank 0 within 0.3 s"):
        accept_leaders(listener, [1, 2], SECRET)
    with socket.socket() as held:  # so that nobody else listens there
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        with pytest.raises(PeerError, match=rf"node 1 cannot reach rank 0 at 127.0.0.1, port {port}"):
            connect_to_rank0("127.0.0.1", port, 1, SECRET)
