"""The loader of the read modes "node" and "rank0": one rank per node, or rank 0 alone, reads for all others."""

from __future__ import annotations

import json
import os
import secrets
import weakref
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable, NamedTuple, Union

import numpy as np

from libai_data.data.datasets.blend import Blend, blend_of
from libai_data.data.datasets.shard_lengths import shard_lengths_of
from libai_data.data.datasets.stream_transform import StreamTransform
from libai_data.data.files.identity import key_of
from libai_data.data.samplers.cursor import Cursor, EpochPositions
from libai_data.data.samplers.lane_order import LaneOrder
from libai_data.data.samplers.sampler import StreamSampler
from libai_data.data.samplers.stream_state import order_in_words
from libai_data.data.transforms.batch import BatchTransform
from libai_data.delivery.feeds import Feed, LinkFeed, LocalFeed, NodeBatch, NodePublisher, for_oneself, in_one_line
from libai_data.delivery.network import NetworkFeed, NetworkPublisher
from libai_data.delivery.read_plan import ReadPlan
from libai_data.delivery.same_values import check_same_arguments
from libai_data.errors import ConfigError, ContractError, DataPipelineError, PassError, PeerError
from libai_data.loader.arena import Arena
from libai_data.loader.assembly import assemble
from libai_data.loader.batch_loader import BatchLoader
from libai_data.loader.iteration import Pass, refuse_in_fork
from libai_data.loader.resumable import ResumableLoader, finish
from libai_data.mesh.current import broadcast_py_object, get_rank
from libai_data.mesh.peers.links import (
    accept_followers,
    accept_leaders,
    connect_to_leader,
    connect_to_rank0,
    open_network_link,
    open_node_link,
)
from libai_data.mesh.peers.liveness import collectives_begun
from libai_data.structures import Agreement, BatchInfo, Instance, Origin, RowIndices

_SENT_AHEAD = 4  # batches that may wait at each end of the connection to another node
_HANDED_OUT_AHEAD = 1  # batches that other ranks may get before this rank does


@dataclass(frozen=True)
class DatasetSummary:
    """What a rank that does not open the dataset knows about it."""

    name: str
    samples: int
    blend: Blend | None = None  # the proportions, if it is a blend
    is_stream_transform: bool = False
    shards: str = ""  # digest of `lengths`
    lengths: bytes = field(default=b"", repr=False)  # lengths of the shards, int64 [shards]; empty without lanes
    reads_to_measure: bool = False  # that of a stream transform

    def __len__(self) -> int:
        return self.samples

    @property
    def shard_lengths(self) -> np.ndarray | None:
        return np.frombuffer(self.lengths, np.int64) if self.lengths else None


class _Announcement(NamedTuple):
    """What a rank that reads sends to the other ranks."""

    dataset: DatasetSummary
    collates: bool
    check_every: int
    fingerprint: str


Publisher = Union[NodePublisher, NetworkPublisher]


class SharedLoader(ResumableLoader):
    """A loader with the interface and the batches of `DataLoader`, of which one rank reads for several.

    Making a loader is collective: all ranks must make their loaders in the same order, on the main thread. Beginning a
    pass and getting a batch are collective, too.

    Args:
        open_dataset: makes the dataset; called only on the ranks that read.
        make_stream: makes the sampler of these shards, for a dataset or a `DatasetSummary`.
        make_loader: makes the loader of a dataset and a sampler.
        mixup_func: kept for the trainer, which applies it to each batch, unless the reader does (a `BatchTransform`).

    Raises:
        DataPipelineError: A rank could not open the dataset or make its loader; raised on all ranks.
        PeerError: Ranks could not connect to each other.
    """

    def __init__(
        self,
        plan: ReadPlan,
        open_dataset: Callable[[], Any],
        make_stream: Callable[[Any, tuple[int, ...]], StreamSampler],
        make_loader: Callable[[Any, StreamSampler], BatchLoader],
        mixup_func: Any = None,
    ) -> None:
        self._plan = plan
        self._begun_in = os.getpid()
        self._rank = rank = plan.mesh.rank
        self._held = plan.shards_in_memory_of(plan.node_of(rank))
        self.mixup_func = None if isinstance(mixup_func, BatchTransform) else mixup_func
        self._loader: BatchLoader | None = None
        facts, collates, check_every, fingerprint = self._open(open_dataset, make_stream, make_loader)
        self.fingerprint: dict[str, Any] = json.loads(fingerprint)
        self.dataset: Any = self._loader.dataset if self._loader is not None else facts
        self.batch_sampler = self.stream = make_stream(facts, (plan.mesh.shard_of(rank),))
        self.stream.exchanges_starts = plan.mesh.data_parallel_size > 1
        order = order_in_words(self.stream)
        self._agreement = Agreement(
            collates, check_every, order, plan.mesh.data_parallel_size, first_use=collectives_begun()
        )
        # If ranks of this node get the same rows, each gets them copy-on-write, because a model may change its inputs.
        shards = [plan.mesh.shard_of(each) for each in plan.ranks_of(plan.node_of(rank))]
        self._has_peers = len(set(shards)) < len(shards)
        self._arena: Arena | None = None
        self._publishers: list[Publisher] = []
        self._feed = self._connect()
        self._ready: deque[NodeBatch | None] = deque()
        self._failure_ahead: Exception | None = None
        self._passes = 0
        self._end_message = ""
        self._is_closed = False
        # A loader that nobody closes must disconnect from other ranks, too: when it is deleted, or its process ends.
        self._hang_up = weakref.finalize(self, _hang_up, self._feed, self._publishers, self._ready)

    def _open(
        self,
        open_dataset: Callable[[], Any],
        make_stream: Callable[[Any, tuple[int, ...]], StreamSampler],
        make_loader: Callable[[Any, StreamSampler], BatchLoader],
    ) -> _Announcement:
        """Open the dataset on the ranks that read, and describe it, or the failure, to all ranks."""
        plan = self._plan

        def opened() -> _Announcement:
            dataset = open_dataset()
            self._loader = loader = make_loader(dataset, make_stream(dataset, plan.shards_read_by(self._rank)))
            has_lanes = isinstance(getattr(loader.stream, "order", None), LaneOrder)
            lengths = shard_lengths_of(dataset).tobytes() if has_lanes else b""
            is_transform, digest = isinstance(dataset, StreamTransform), key_of(lengths)
            measures = is_transform and dataset.reads_to_measure
            name, blend = type(dataset).__name__, blend_of(dataset)
            facts = DatasetSummary(name, len(dataset), blend, is_transform, digest, lengths, measures)
            return _Announcement(facts, loader.collates, loader.check_every, json.dumps(loader.fingerprint))

        answers: dict[int, _Announcement] = call_on(plan.reading_ranks, opened, "open the dataset")
        if len(set(answers.values())) > 1:
            raise ConfigError(f"the nodes see different datasets: {answers}; every node needs the same files")
        return answers[0]

    def _connect(self) -> Feed:
        """Connect the ranks: rank 0 to the leaders of the nodes, and each leader to the ranks of its node."""
        plan, mesh, rank = self._plan, self._plan.mesh, self._rank
        node, leader = plan.node_of(rank), plan.leader_of(rank)
        crosses = plan.readers == "rank0" and mesh.num_nodes > 1
        network: Any = None

        def begun() -> tuple[str, str, int]:
            nonlocal network
            network, port = open_network_link() if crosses else (None, 0)
            # Two values, because every user of the machine can read the name. The secret protects the network link.
            return secrets.token_hex(16), secrets.token_hex(16), port

        name, secret, port = call_on([0], begun, "listen for other nodes")[0]
        name = f"{name}/{node}"
        opened: list[Any] = []

        def open_node() -> None:
            opened.extend((open_node_link(name), Arena() if self._loader is None else self._loader.shared_arena()))

        leaders = sorted({plan.leader_of(other) for other in range(mesh.world_size)})
        call_on(leaders, open_node, "open the link of its node")
        if rank != leader:
            return LinkFeed(connect_to_leader(name, rank, leader), leader, self._has_peers)
        listener, arena = opened
        if self._loader is not None:
            feed: Feed = LocalFeed(self._loader, len(self._held), _SENT_AHEAD + 1 if crosses else 0)
        else:
            host = os.environ.get("MASTER_ADDR", "127.0.0.1")
            feed = NetworkFeed(connect_to_rank0(host, port, node, secret), arena, _SENT_AHEAD)
        self._arena = arena
        followers = [other for other in plan.ranks_of(node) if other != leader]
        self._publishers.append(NodePublisher(accept_followers(listener, followers), arena.descriptor))
        if network is not None:
            links = accept_leaders(network, range(1, mesh.num_nodes), secret)
            self._publishers += [
                NetworkPublisher(link, other, plan, _SENT_AHEAD) for other, link in sorted(links.items())
            ]
        return feed

    @property
    def collates(self) -> bool:
        """Whether a collator makes the batches, so that their shapes may change."""
        return self._agreement.per_batch

    def new_pass(self, as_numpy: bool = False) -> Pass:
        if self._is_closed:
            raise PeerError(
                "this loader was closed, so it no longer serves the other ranks; make a new loader on all ranks"
            )
        refuse_in_fork(self._begun_in, "this loader")
        self._break_off("a newer iterator of this loader has begun; only the newest one may be used")
        first = self.stream.next_pass()
        self._agreement.order = order_in_words(self.stream)
        if self._loader is not None:
            self._loader.stream.take_over(self.stream)
            self._loader.stream.cursor = first
        for publisher in self._publishers:
            publisher.begin()
        self._feed.begin(first.position)
        self._expected: Cursor | None = first
        return Pass(self.stream, first, partial(self._take, self._passes, as_numpy), self.one_thread)

    def _take(self, number: int, as_numpy: bool) -> tuple[Instance, Cursor] | None:
        """This rank's part of the next batch of pass `number`, the newest one; None at its end."""
        if number != self._passes:
            raise PassError(self._end_message)
        try:
            if not self._ready:
                if self._failure_ahead is not None:
                    raise self._failure_ahead
                self._publish(self._feed.next())
            self._publish_ready()
        except BaseException as error:
            self._ready.clear()
            self._failure_ahead = None
            for publisher in self._publishers:
                with suppress(DataPipelineError):
                    publisher.fail(error)
            if number != self._passes and isinstance(error, Exception):
                raise PassError(self._end_message) from error  # Another thread has closed this loader.
            raise
        batch = self._ready.popleft()
        if batch is None:
            return None
        expected, self._expected = self._expected, None
        if expected is not None:
            self._check_place(expected, batch.info)
        cursor = self.stream.after(batch.info)
        self.stream.note_start(cursor.position, batch.info.next_start)
        return self._own_part(batch, as_numpy), cursor

    def _check_place(self, expected: Cursor, found: BatchInfo) -> None:
        by_epoch = isinstance(self.stream, EpochPositions) and not self.endless
        own, theirs = (expected.position, expected.epoch), (found.position, found.epoch if by_epoch else 0)
        # If nothing is left of the epoch, only the rank that reads finds this. Then it begins the next epoch.
        if theirs == own or (expected.position and by_epoch and theirs == (0, expected.epoch + 1)):
            return
        words, their_words = (f"position {place}{f' of epoch {epoch}' * by_epoch}" for place, epoch in (own, theirs))
        raise ContractError(
            f"rank {self._rank} begins a pass at {words}, but the rank that reads for it begins at {their_words}: load "
            "the same state, and set the same epoch, on all ranks"
        )

    def _publish(self, batch: NodeBatch | None) -> None:
        for publisher in self._publishers:
            if batch is None:
                publisher.end()
            else:
                publisher.publish(batch)
        self._ready.append(batch)

    def _publish_ready(self) -> None:
        """Publish batches that were read ahead, so that no other rank waits until this rank asks for its next batch."""
        while self._publishers and self._failure_ahead is None and len(self._ready) <= _HANDED_OUT_AHEAD:
            try:
                batch = self._feed.next_if_ready()
            except Exception as error:
                # Raised when this rank asks for that batch, as on a rank that reads for itself.
                self._failure_ahead = error
                return
            if batch is None:
                return
            self._publish(batch)

    def _break_off(self, why: str) -> None:
        """End the newest pass; its iterator raises `why` from now on."""
        self._passes += 1
        self._end_message = why
        self._ready.clear()
        self._failure_ahead = None

    def _own_part(self, batch: NodeBatch, as_numpy: bool) -> Instance:
        rows = batch.info.size // self._plan.mesh.data_parallel_size
        # A batch for one shard belongs to this rank, whatever number of rows a collator made.
        own = slice(None) if len(self._held) == 1 else self._plan.rows_of(self._rank, self._held, rows)
        whole = batch.arrays if self._arena is None or not self._has_peers else for_oneself(batch, self._arena)
        arrays = {name: array[own] for name, array in whole.items()}
        read = None if batch.rows is None else RowIndices(batch.rows.epochs[own], batch.rows.indices[own])
        # Fields whose bytes were not sent to this node, because none of its ranks needs them.
        node, is_sent = self._plan.node_of(self._rank), self._plan.is_sent_to
        absent = frozenset(name for name, each in batch.layouts.items() if not is_sent(node, each.placement_idx))
        origin = Origin(batch.info, read, self._agreement, absent=absent)
        return assemble(arrays, batch.layouts, batch.skeleton, origin, as_numpy)

    def stats(self) -> dict[str, Any]:
        """Where the time was spent, on a rank that reads; see `BatchLoader.stats`. Empty on other ranks."""
        return self._loader.stats() if self._loader is not None else {}

    def close(self) -> None:
        """End the workers and disconnect from the other ranks; batches that are in use stay valid.

        The loader cannot be iterated again. A rank may close it after its last batch; the other ranks need not wait.
        """
        self._is_closed = True
        self._break_off("the loader was closed")
        finish(self._hang_up)


def call_on(ranks: Collection[int], act: Callable[[], Any], what: str) -> dict[int, Any]:
    """Call `act` on some ranks, and return each result on all ranks; a failure of one rank is raised on all."""
    result, failure = None, None
    if get_rank() in ranks:
        try:
            result = act()
        except (Exception, SystemExit) as error:
            failure = error
    problem = "" if failure is None else in_one_line(failure)
    answers = {rank: broadcast_py_object((result, problem), src=rank) for rank in ranks}
    if failure is not None:
        raise failure
    for rank, (_, problem) in answers.items():
        if problem:
            raise PeerError(f"rank {rank}, which reads for others, could not {what}: {problem}")
    return {rank: answer for rank, (answer, _) in answers.items()}


def _hang_up(feed: Feed, publishers: list[Publisher], ready: deque[NodeBatch | None]) -> None:
    untaken = len(ready)
    ready.clear()
    # The feed first, so that nothing writes into memory with batches for other ranks, which is released next.
    feed.close()
    for publisher in publishers:
        publisher.close(untaken)
    publishers.clear()


Loader = Union[BatchLoader, SharedLoader]


def loader_for(
    plan: ReadPlan,
    open_dataset: Callable[[], Any],
    make_stream: Callable[[Any, tuple[int, ...]], Any],
    make_loader: Callable[[Any, Any], BatchLoader],
    mixup_func: Any,
    compared: Mapping[str, Any],
) -> Loader:
    """Make the loader of a read mode; see `SharedLoader`. `compared` must be equal on all ranks if they share it."""
    if plan.readers != "every_rank":
        check_same_arguments(plan.readers, **compared)
        return SharedLoader(plan, open_dataset, make_stream, make_loader, mixup_func)
    dataset = open_dataset()
    return make_loader(dataset, make_stream(dataset, plan.shards_read_by(plan.mesh.rank)))
