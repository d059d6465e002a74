"""Feeds: where ranks get their batches from in the read modes "node" and "rank0"."""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Optional, Protocol

import numpy as np

from libai_data.data.nesting import Skeleton
from libai_data.errors import PeerError, SchemaError, error_text
from libai_data.loader.arena import Arena
from libai_data.loader.batch_loader import BatchLoader
from libai_data.loader.batch_reader import ReadyBatch, info_of
from libai_data.loader.iteration import Iteration
from libai_data.loader.schema import Layout
from libai_data.loader.slots import ArraySpec, views
from libai_data.mesh.peers.channel import Channel
from libai_data.mesh.peers.liveness import waiting_for_rank
from libai_data.structures import BatchInfo, RowIndices

MOST_UNTAKEN = 4
"""The most batches that wait for one rank of the node. Then the leader waits, too, so that memory stays bounded."""

_KEPT = MOST_UNTAKEN + 3  # batches that wait for other ranks, that they use, or whose release is not yet received


@dataclass(frozen=True)
class NodeBatch:
    """A batch in the memory that the ranks of a node share."""

    info: BatchInfo
    rows: RowIndices | None  # its samples, if this process read them
    # For each field, the rows of all shards that are delivered to the node; the arrays keep the memory in use.
    arrays: dict[str, np.ndarray]
    layouts: dict[str, Layout]
    skeleton: Skeleton | None  # how the batch is nested; None if all its fields are tensors
    place: tuple[int, int]  # offset and size in the arena
    specs: tuple[ArraySpec, ...]  # where each array is within this place


_Form = tuple[tuple[ArraySpec, ...], dict[str, Layout], Optional[Skeleton]]
"""What batches have in common, which is sent once: where arrays are, their layouts, how they are nested."""


def in_one_line(error: BaseException) -> str:
    """An error in one line, for the other ranks; the rank that caused it prints its traceback."""
    return error_text(error).strip().partition(chr(10))[0]


def for_oneself(batch: NodeBatch, arena: Arena) -> dict[str, np.ndarray]:
    """A batch's arrays, copy-on-write: other ranks do not see writes. The arrays keep the batch's memory in use."""
    lease = arena.private_lease(*batch.place)
    # The finalizer keeps the batch, and so its slot, in use until nobody refers to the private memory.
    weakref.finalize(lease, lambda batch: None, batch).atexit = False
    return views(lease, batch.specs)


class Feed(Protocol):
    """Returns the batches of one pass after the other."""

    def begin(self, position: int) -> None:
        """Begin a pass at this position of the stream; an earlier one is over."""

    def next(self) -> NodeBatch | None:
        """Wait for the next batch; None at the end of the pass."""

    def next_if_ready(self) -> NodeBatch | None:
        """The next batch if it is available without waiting, otherwise None."""

    def close(self) -> None:
        """End the loader, or the connection and its threads."""


class LocalFeed(Feed):
    """Reads batches for all ranks it serves, on a node's leader or rank 0; `also_kept` batches may wait to be sent."""

    def __init__(self, loader: BatchLoader, shards: int, also_kept: int = 0) -> None:
        self._loader = loader
        self._shards = shards
        self._kept = _KEPT + also_kept
        self._pass: Iteration | None = None

    def begin(self, position: int) -> None:
        self._pass = self._loader.begin(position, also_kept=self._kept)

    def next(self) -> NodeBatch | None:
        batch = next(self._pass, None) if self._pass is not None else None
        return None if batch is None else self._shared(batch)

    def next_if_ready(self) -> NodeBatch | None:
        batch = self._pass.next_if_ready() if self._pass is not None else None
        return None if batch is None else self._shared(batch)

    def _shared(self, batch: ReadyBatch) -> NodeBatch:
        self._check_rows(batch)
        batch, slot = self._loader.in_slot(batch)
        read = batch.index_batch
        rows, place = RowIndices(read.epochs, read.indices), (slot.offset, slot.size)
        return NodeBatch(info_of(read), rows, batch.arrays, batch.layouts, batch.skeleton, place, batch.specs)

    def _check_rows(self, batch: ReadyBatch) -> None:
        """Raise an error if a batch for several ranks has not one row per sample: the ranks share it by rows."""
        rows = len(batch.index_batch.indices)
        for name, array in batch.arrays.items():
            if self._shards > 1 and (not array.ndim or len(array) != rows):
                raise SchemaError(
                    f"field '{name}' has shape {list(array.shape)}, but a batch for {self._shards} data-parallel ranks "
                    f"needs one row for each of its {rows} samples; let the collator keep the rows, or use "
                    "readers=every_rank"
                )

    def close(self) -> None:
        self._loader.close()


class LinkFeed(Feed):
    """Receives batches from the leader of the node, by mapping their memory.

    With `for_itself`, other ranks do not see what this rank writes into a batch.
    """

    def __init__(self, channel: Channel, leader: int, for_itself: bool = False) -> None:
        self._channel = channel
        self._leader = leader
        self._for_itself = for_itself
        self._arena = Arena(channel.receive_descriptor())
        self._generation = 0
        self._received = 0
        self._form: _Form = ((), {}, None)
        self._in_use: set[int] = set()
        # Appended to by finalizers, in any thread.
        self._released: deque[int] = deque()

    def begin(self, position: int) -> None:
        """Begin a new pass; batches of an earlier pass that still come are returned unused."""
        self._generation += 1

    def next(self) -> NodeBatch | None:
        while True:
            self._report()
            try:
                with waiting_for_rank(f"a batch of rank {self._leader}"):
                    kind, generation, content = self._channel.receive()
            except (EOFError, OSError) as error:
                raise PeerError(
                    f"rank {self._leader}, which distributes the batches on this node, is gone, or has closed or "
                    "deleted this loader while this rank needs another batch; see its output"
                ) from error
            if kind == "form":
                self._form = content
            elif kind == "batch":
                self._received += 1
                batch = self._map(*content)
                if generation == self._generation:
                    return batch
            elif generation == self._generation:
                if kind == "error":
                    raise PeerError(
                        f"rank {self._leader}, which distributes the batches on this node, failed: {content}"
                    )
                return None

    def next_if_ready(self) -> NodeBatch | None:
        """Always None: no other rank waits for batches from this rank."""
        return None

    def _map(self, number: int, place: tuple[int, int], info: BatchInfo) -> NodeBatch:
        specs, layouts, skeleton = self._form
        lease = self._arena.private_lease(*place) if self._for_itself else self._arena.lease(*place)
        weakref.finalize(lease, self._released.append, number).atexit = False
        self._in_use.add(number)
        return NodeBatch(info, None, views(lease, specs), layouts, skeleton, place, specs)

    def _report(self) -> None:
        """Report to the leader how many batches this rank has received, and which it has released."""
        numbers = self._release()
        with suppress(OSError):  # If the leader is gone, the next receive raises an error.
            self._channel.send(("news", (self._received, numbers)))

    def _release(self) -> list[int]:
        numbers: list[int] = []
        while self._released:
            numbers.append(self._released.popleft())
        self._in_use.difference_update(numbers)
        return numbers

    def close(self) -> None:
        """Disconnect from the leader and release the memory. Batches that are in use stay valid."""
        self._release()
        with suppress(OSError):
            self._channel.send(("leave", self._in_use))
        self._channel.stop_receiving()
        self._channel.close()
        self._arena.close()


class NodePublisher:
    """Announces each batch to the other ranks of a node, and keeps the batch until all have released it.

    Each follower first receives the descriptor of the arena, the memory of the batches.
    """

    def __init__(self, followers: dict[int, Channel], arena: int) -> None:
        self._followers = followers
        for channel in followers.values():
            channel.send_descriptor(arena)
        self._held: dict[int, tuple[NodeBatch, list[int]]] = {}
        self._received = dict.fromkeys(followers, 0)
        self._form: _Form | None = None
        self._generation = 0
        self._published = 0

    def begin(self) -> None:
        """Begin a new pass."""
        self._generation += 1

    def publish(self, batch: NodeBatch) -> None:
        """Announce a batch to all followers, and wait for slow ones; a PeerError names one that died."""
        for rank in list(self._followers):
            while rank in self._followers and self._followers[rank].speaks():
                self._receive(rank)
            while rank in self._followers and self._published - self._received[rank] >= MOST_UNTAKEN:
                self._receive(rank)
        form = (batch.specs, batch.layouts, batch.skeleton)
        if form != self._form:
            self._form = form
            self._send("form", form)
        if self._followers:
            self._held[self._published] = (batch, list(self._followers))
        self._send("batch", (self._published, batch.place, batch.info))
        self._published += 1

    def end(self) -> None:
        """Tell the followers that the pass is over."""
        self._send("end", None)

    def fail(self, error: BaseException) -> None:
        """Tell the followers that are still there that reading failed."""
        for channel in self._followers.values():
            with suppress(OSError):
                channel.send(("error", self._generation, in_one_line(error)))

    def _send(self, kind: str, content: object) -> None:
        for rank, channel in list(self._followers.items()):
            try:
                channel.send((kind, self._generation, content))
            except ConnectionError:
                # The follower may have left before it could receive this message.
                while rank in self._followers:
                    self._receive(rank)

    def _receive(self, rank: int) -> None:
        """Wait for a message of a follower, and process it."""
        try:
            with waiting_for_rank(f"rank {rank}, which does not ask for a batch"):
                kind, content = self._followers[rank].receive()
        except (EOFError, OSError) as error:
            raise PeerError(f"rank {rank} of this node is gone; see its output") from error
        if kind == "leave":
            self._followers.pop(rank).close()
            self._release(rank, [number for number in self._held if number not in content])
        else:
            self._received[rank], released = content
            self._release(rank, released)

    def _release(self, rank: int, numbers: list[int]) -> None:
        for number in numbers:
            _, holders = self._held[number]
            if rank in holders:
                holders.remove(rank)
            if not holders:
                del self._held[number]

    def close(self, untaken: int = 0) -> None:
        """Disconnect from the followers, and release all batches, also the last `untaken` ones, which nobody needs."""
        for channel in self._followers.values():
            channel.close()
        self._followers.clear()
        self._held.clear()
