"""Feeds: where a rank that does not read for itself alone gets batches from."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Deque, Dict, List, Optional, Protocol, Tuple

import numpy as np

from libai_data.errors import PeerError
from libai_data.loader.arena import Arena
from libai_data.loader.batches import ReadyBatch, info_of
from libai_data.loader.channel import Channel
from libai_data.loader.dataloader import DataLoader
from libai_data.loader.iteration import Iteration
from libai_data.loader.schema import Layout
from libai_data.loader.slots import ArraySpec, views
from libai_data.structures import BatchInfo, RowIndices

_KEPT = 4
"""Batches that are still on their way back from other ranks, or handed out before this rank takes them."""


@dataclass(frozen=True)
class NodeBatch:
    """A batch as it lies in the memory that the ranks of a node share.

    Args:
        info: its place in the stream.
        rows: which samples it holds, where this process read them.
        arrays: of each field, the rows of all shards that are delivered to the node; they keep the memory in use.
        layouts: of each field.
        place: offset and size in the arena.
        specs: where each array lies within this place.
    """

    info: BatchInfo
    rows: Optional[RowIndices]
    arrays: Dict[str, np.ndarray]
    layouts: Dict[str, Layout]
    place: Tuple[int, int]
    specs: Tuple[ArraySpec, ...]


class Feed(Protocol):
    """Gives the batches of one pass after the other."""

    def begin(self, position: int) -> None:
        """Begin a pass at this position of the stream; an earlier one is over."""

    def next(self) -> Optional[NodeBatch]:
        """Wait for the next batch; None at the end of the pass."""

    def next_if_ready(self) -> Optional[NodeBatch]:
        """The next batch if it can be had without waiting."""

    def close(self) -> None:
        """End all that was started."""


class LocalFeed:
    """Reads the batches: on a node's leader, or on rank 0.

    Args:
        loader: reads the shards of all ranks it serves.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        self._pass: Optional[Iteration] = None

    def begin(self, position: int) -> None:
        """Begin a pass at this position of the stream; an earlier one is over."""
        self._pass = self._loader.begin(position, also_kept=_KEPT)

    def next(self) -> Optional[NodeBatch]:
        """Wait for the next batch; None at the end of the pass."""
        batch = next(self._pass, None) if self._pass is not None else None
        return None if batch is None else self._shared(batch)

    def next_if_ready(self) -> Optional[NodeBatch]:
        """The next batch if it has been read by now."""
        batch = self._pass.next_if_ready() if self._pass is not None else None
        return None if batch is None else self._shared(batch)

    def _shared(self, batch: ReadyBatch) -> NodeBatch:
        if batch.slot is None:
            batch = self._loader.copied_into_slot(batch)
        slot = batch.slot
        if slot is None:
            raise RuntimeError("a batch that was copied into a slot has none")
        read = batch.index_batch
        rows, place = RowIndices(read.epochs, read.indices), (slot.offset, slot.size)
        return NodeBatch(info_of(read), rows, batch.arrays, batch.layouts, place, batch.specs)

    def close(self) -> None:
        """End the workers."""
        self._loader.close()


class LinkFeed:
    """Takes batches over from the leader of the node, by mapping the memory they lie in.

    Args:
        channel: to the leader.
        leader: its rank, named in errors.
    """

    def __init__(self, channel: Channel, leader: int) -> None:
        self._channel = channel
        self._leader = leader
        self._arena = Arena(channel.receive_descriptor())
        self._generation = 0
        self._form: Tuple[Tuple[ArraySpec, ...], Dict[str, Layout]] = ((), {})
        # Appended to by finalizers, in any thread.
        self._released: Deque[int] = deque()

    def begin(self, position: int) -> None:
        """Wait for batches of a new pass; those of an earlier one are given back unseen."""
        self._generation += 1

    def next(self) -> Optional[NodeBatch]:
        """Wait for the next batch; None at the end of the pass.

        Raises:
            PeerError: The leader failed or is gone.
        """
        self._give_back()
        while True:
            try:
                kind, generation, content = self._channel.receive()
            except (EOFError, OSError) as error:
                raise PeerError(
                    f"rank {self._leader}, which hands out the batches on this node, is gone; its output tells why"
                ) from error
            if kind == "form":
                self._form = content
            elif kind == "batch":
                batch = self._map(*content)
                if generation == self._generation:
                    return batch
            elif generation == self._generation:
                if kind == "error":
                    raise PeerError(f"rank {self._leader}, which hands out the batches on this node, failed: {content}")
                return None

    def next_if_ready(self) -> Optional[NodeBatch]:
        """None: nobody waits for what this rank takes in."""
        return None

    def _map(self, number: int, place: Tuple[int, int], info: BatchInfo) -> NodeBatch:
        specs, layouts = self._form
        lease = self._arena.lease(*place)
        weakref.finalize(lease, self._released.append, number).atexit = False
        return NodeBatch(info, None, views(lease, specs), layouts, place, specs)

    def _give_back(self) -> None:
        numbers: List[int] = []
        while self._released:
            numbers.append(self._released.popleft())
        if numbers:
            try:
                self._channel.send(("released", numbers))
            except OSError:
                return  # the leader is gone; receiving says so

    def close(self) -> None:
        """Let go of the leader and the memory."""
        self._channel.close()
        self._arena.close()


class NodePublisher:
    """Tells the other ranks of a node of each batch, and keeps it until all have let go of it.

    Args:
        followers: channel to each, by rank.
        arena: descriptor of the memory that the batches lie in; the first thing that each follower is sent.
    """

    def __init__(self, followers: Dict[int, Channel], arena: int) -> None:
        self._followers = followers
        for channel in followers.values():
            channel.send_descriptor(arena)
        self._held: Dict[int, Tuple[NodeBatch, List[int]]] = {}
        self._form: Optional[Tuple[Tuple[ArraySpec, ...], Dict[str, Layout]]] = None
        self._generation = 0
        self._published = 0

    def begin(self) -> None:
        """Begin a new pass."""
        self._generation += 1

    def publish(self, batch: NodeBatch) -> None:
        """Hand a batch out to all followers.

        Raises:
            PeerError: A follower is gone; it is named.
        """
        self.collect()
        form = (batch.specs, batch.layouts)
        if form != self._form:
            self._form = form
            self._tell("form", form)
        if self._followers:
            self._held[self._published] = (batch, list(self._followers))
        self._tell("batch", (self._published, batch.place, batch.info))
        self._published += 1

    def end(self) -> None:
        """Say that the pass is over."""
        self._tell("end", None)

    def fail(self, error: BaseException) -> None:
        """Say that reading failed, to whoever is still there."""
        for rank in list(self._followers):
            try:
                self._followers[rank].send(("error", self._generation, f"{type(error).__name__}: {error}"))
            except OSError:
                continue

    def collect(self) -> None:
        """Take note of what followers have let go of.

        Raises:
            PeerError: A follower is gone; it is named.
        """
        for rank, channel in self._followers.items():
            while channel.speaks():
                try:
                    _, numbers = channel.receive()
                except (EOFError, OSError) as error:
                    raise PeerError(f"rank {rank} of this node is gone; its output tells why") from error
                for number in numbers:
                    _, holders = self._held[number]
                    holders.remove(rank)
                    if not holders:
                        del self._held[number]

    def _tell(self, kind: str, content: object) -> None:
        for rank, channel in self._followers.items():
            try:
                channel.send((kind, self._generation, content))
            except OSError as error:
                raise PeerError(f"rank {rank} of this node is gone; its output tells why") from error

    def close(self) -> None:
        """Let go of the followers and of what they held."""
        for channel in self._followers.values():
            channel.close()
        self._held.clear()
