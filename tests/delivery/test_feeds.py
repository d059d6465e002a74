"""Batches handed out within a node: the same bytes, given back, bounded, and no one waits for who has left or died."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libai_data.data.samplers import CyclicSampler
from libai_data.delivery.feeds import MOST_UNTAKEN, LinkFeed, LocalFeed, NodeBatch, NodePublisher
from libai_data.errors import PeerError, SampleError, SchemaError
from libai_data.loader import BatchLoader
from libai_data.mesh.peers.channel import Channel
from tests.deadline import stretched, wait_until

ROWS = [{"x": np.full((3, 5), index, dtype=np.float32), "y": index} for index in range(64)]


class Node:
    """A leader that reads batches of 8 for 2 shards, and two followers, in one process."""

    def __init__(self, **options: Any) -> None:
        self.loader = BatchLoader(ROWS, CyclicSampler(ROWS, 8), **options)
        self.feed = LocalFeed(self.loader, shards=2)
        pairs = {rank: Channel.pair() for rank in (1, 2)}
        self.ends = {rank: theirs for rank, (_, theirs) in pairs.items()}
        self.publisher = NodePublisher(
            {rank: ours for rank, (ours, _) in pairs.items()}, self.loader.shared_arena().descriptor
        )
        self.followers = {rank: LinkFeed(end, leader=0) for rank, end in self.ends.items()}

    def begin(self, position: int = 0) -> None:
        self.publisher.begin()
        self.feed.begin(position)
        for follower in self.followers.values():
            follower.begin(position)

    def publish(self) -> NodeBatch:
        batch = self.feed.next()
        assert batch is not None
        self.publisher.publish(batch)
        return batch

    def take(self) -> list[Any]:
        return [follower.next() for follower in self.followers.values()]

    def close(self) -> None:
        for follower in self.followers.values():
            follower.close()
        self.publisher.close()
        self.feed.close()


@pytest.fixture(params=[0, 2], ids=["in-process", "workers"])
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    made = Node(num_workers=request.param)
    yield made
    made.close()


def content(batch: Any) -> tuple[Any, ...]:
    assert batch is not None
    return batch.info, [(name, array.dtype, array.tolist()) for name, array in batch.arrays.items()], batch.layouts


def test_followers_get_what_the_leader_read(node: Node) -> None:
    node.begin(position=16)
    for number in range(12):
        published = content(node.publish())
        assert published[0].position == 16 + 8 * number
        assert [content(batch) for batch in node.take()] == [published] * 2


def test_a_batch_stays_as_it_is_while_any_rank_keeps_it(node: Node) -> None:
    node.begin()
    kept: list[tuple[NodeBatch, Any]] = []
    for number in range(20):
        published = node.publish()
        before = content(published)
        del published
        taken = node.followers[1].next()
        assert taken is not None
        node.followers[2].next()
        if number % 5 == 0:
            kept.append((taken, before))
    for batch, before in kept:
        assert content(batch) == before


def test_a_batch_stays_as_it_is_after_its_follower_has_left(node: Node) -> None:
    node.begin()
    kept = []
    for number in range(3):
        before = content(node.publish())
        node.followers[2].next()
        taken = node.followers[1].next()
        if number:
            kept.append((taken, before))
        del taken
    node.followers[1].close()
    for _ in range(20):
        node.publish()
        node.followers[2].next()
    for batch, before in kept:
        assert content(batch) == before
    assert list(node.publisher._held)[:2] == [1, 2], "the first batch, which the follower let go of, is in use again"


def test_memory_does_not_grow_with_the_number_of_batches(node: Node) -> None:
    node.begin()
    sizes = []
    for _ in range(200):
        node.publish()
        node.take()
        sizes.append(os.fstat(node.loader.shared_arena().descriptor).st_size)
    assert sizes[-1] == sizes[20]


def test_a_leader_waits_for_a_follower_that_is_far_behind(node: Node) -> None:
    batches = 3 * MOST_UNTAKEN
    node.begin()
    node.publish()  # When the workers run, half a second is long.
    node.followers[1].next()
    published = [0]

    def lead() -> None:
        for number in range(1, batches):
            node.publish()
            published.append(number)

    def take(rank: int) -> None:
        for _ in range(batches - (rank == 1)):
            assert node.followers[rank].next() is not None

    others = [threading.Thread(target=lead, daemon=True), threading.Thread(target=take, args=(1,), daemon=True)]
    for thread in others:
        thread.start()
    wait_until(lambda: len(published) >= MOST_UNTAKEN, "leader that is far ahead")
    others[0].join(timeout=0.5)
    assert len(published) == MOST_UNTAKEN
    take(2)
    for thread in others:
        thread.join(timeout=stretched(60))
        assert not thread.is_alive()


def test_batches_of_a_broken_off_pass_are_given_back_unseen(node: Node) -> None:
    node.begin()
    for _ in range(3):
        node.publish()
    node.begin(position=32)
    published = content(node.publish())
    assert [content(batch) for batch in node.take()] == [published] * 2
    for _ in range(3):
        node.publish()
        node.take()
    gc.collect()
    assert len(node.publisher._held) <= 2


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_a_follower_that_takes_its_leave_is_not_missed(node: Node, reads_ahead: bool) -> None:
    node.begin()
    for _ in range(3):
        node.publish()
        node.take()
    if reads_ahead:  # What it was told of and did not hear resets the connection; its leave must be heard all the same.
        node.publish()
        node.followers[1].next()
    node.followers[2].close()
    for _ in range(12):
        published = content(node.publish())
        assert content(node.followers[1].next()) == published
    assert list(node.publisher._followers) == [1]


def test_a_follower_that_dies_is_named(node: Node) -> None:
    node.begin()
    node.publish()
    node.ends[2].close()
    with pytest.raises(PeerError, match="rank 2 of this node is gone"):
        for _ in range(3):
            node.publish()
            node.followers[1].next()
    node.followers.pop(2)._arena.close()


def test_a_leader_that_dies_is_named_after_its_last_batch(node: Node) -> None:
    node.begin()
    node.publish()
    node.publish()
    for channel in node.publisher._followers.values():
        channel.close()
    for follower in node.followers.values():
        assert follower.next() is not None
        assert follower.next() is not None
        with pytest.raises(PeerError, match="rank 0, which distributes the batches on this node, is gone"):
            follower.next()


def test_a_leader_that_closes_its_loader_early_is_not_only_called_gone(node: Node) -> None:
    node.begin()
    node.publish()
    node.publisher.close()
    follower = node.followers[1]
    assert follower.next() is not None
    with pytest.raises(PeerError, match="is gone, or has closed or deleted this loader while this rank needs another"):
        follower.next()


def test_a_follower_that_another_thread_closes_waits_no_longer(node: Node) -> None:
    node.begin()
    with ThreadPoolExecutor(1) as threads, pytest.raises(PeerError):
        thread = threads.submit(threading.get_native_id).result()
        waiting = threads.submit(node.followers[1].next)
        wait_until(lambda: is_asleep(thread), "thread that waits")
        node.followers[1].close()
        waiting.result(stretched(10))


def is_asleep(thread: int) -> bool:
    return Path(f"/proc/self/task/{thread}/stat").read_text().split()[2] == "S"


def test_followers_are_told_why_reading_failed(node: Node) -> None:
    node.begin()
    node.publish()
    node.publisher.fail(SampleError("sample 7 is broken"))
    for follower in node.followers.values():
        assert follower.next() is not None
        with pytest.raises(PeerError, match=r"rank 0.*failed: SampleError: sample 7 is broken"):
            follower.next()


def test_releases_from_other_threads_are_counted(node: Node) -> None:
    """OneFlow frees a tensor, and with it the batch, in a thread of its own."""
    node.begin()
    for _ in range(30):
        node.publish()
        taken = node.take()
        releasing = threading.Thread(target=taken.clear)
        releasing.start()
        releasing.join()
    assert len(node.loader._slot_list.slots) <= 8


def test_a_batch_for_several_ranks_must_keep_its_rows() -> None:
    def pack(samples: list[Any]) -> dict[str, Any]:
        return {"packed": np.stack([sample["x"] for sample in samples])[:3]}

    loader = BatchLoader(ROWS, CyclicSampler(ROWS, 8), collate_fn=pack)
    feed = LocalFeed(loader, shards=2)
    feed.begin(0)
    with pytest.raises(SchemaError, match=r"field 'packed' has shape \[3, 3, 5\].*2 data-parallel ranks.*8 samples"):
        feed.next()
    feed.close()
