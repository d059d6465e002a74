"""The read plan: which ranks read which part of a global batch, where each rank finds its rows, what nodes send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from libai_data.errors import MeshError
from libai_data.errors.argument_rules import check, one_of
from libai_data.mesh.parallel_mesh import ParallelMesh

READERS = ("every_rank", "node", "rank0")
_EARLIER_NAMES = {"data_parallel": "every_rank"}


def read_mode(readers: str) -> str:
    """The present name of a read mode, or a ConfigError; "data_parallel" is an earlier name of "every_rank"."""
    mode = _EARLIER_NAMES.get(str(readers), readers)
    check({"readers": one_of(*READERS)}, readers=mode)
    return mode


@dataclass(frozen=True)
class ReadPlan:
    """Who reads what. A *shard* is the part of a global batch that belongs to one coordinate of the data axis.

    Args:
        mesh: of the job; its rank is ignored.
        readers: "every_rank" (earlier "data_parallel"): every rank reads its own shard; "node": the first rank of each
            node reads for all of its node; "rank0": rank 0 reads for all.

    Raises:
        ConfigError: Unknown readers.
    """

    mesh: ParallelMesh
    readers: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "readers", read_mode(self.readers))

    def node_of(self, rank: int) -> int:
        """The node that a rank runs on."""
        return rank // self.mesh.ranks_per_node

    def ranks_of(self, node: int) -> range:
        """The ranks of a node, ascending; the first one leads it."""
        first = node * self.mesh.ranks_per_node
        return range(first, first + self.mesh.ranks_per_node)

    def leader_of(self, rank: int) -> int:
        """The rank that delivers batches on the node of a rank."""
        return self.ranks_of(self.node_of(rank))[0]

    def shards_of_node(self, node: int) -> tuple[int, ...]:
        """The shards that are delivered on a node, ascending."""
        return tuple(sorted({self.mesh.shard_of(rank) for rank in self.ranks_of(node)}))

    def shards_read_by(self, rank: int) -> tuple[int, ...]:
        """The shards that a rank reads from the dataset; none if another rank reads for it."""
        if self.readers == "every_rank":
            return (self.mesh.shard_of(rank),)
        if self.readers == "rank0":
            return tuple(range(self.mesh.data_parallel_size)) if rank == 0 else ()
        return self.shards_of_node(self.node_of(rank)) if rank == self.leader_of(rank) else ()

    @property
    def reading_ranks(self) -> list[int]:
        """The ranks that read from the dataset, ascending."""
        return [rank for rank in range(self.mesh.world_size) if self.shards_read_by(rank)]

    def shards_in_memory_of(self, node: int) -> tuple[int, ...]:
        """The shards in a batch's memory on a node: those of its ranks, or all on the node of rank 0 with "rank0"."""
        if self.readers == "rank0" and node == 0:
            return tuple(range(self.mesh.data_parallel_size))
        return self.shards_of_node(node)

    def is_sent_to(self, node: int, placement_idx: int) -> bool:
        """Whether a node gets the bytes of a field that belongs to this layer, or only its shape and dtype."""
        if self.readers != "rank0" or node == 0:
            return True
        try:
            stage = self.mesh.layer_stage(placement_idx)
        except MeshError:
            return True  # `to_global` then raises an error on every rank, which names the field.
        # Without a loop over ranks, because it is called for each batch, field and node.
        ranks, size = self.ranks_of(node), self.mesh.data_parallel_size * self.mesh.tensor_parallel_size
        return ranks[0] < (stage + 1) * size and stage * size <= ranks[-1]

    def rows_of(self, rank: int, held: tuple[int, ...], micro_batch_size: int) -> slice:
        """A rank's rows within memory that contains the shards `held`, ascending, one after the other."""
        first = held.index(self.mesh.shard_of(rank)) * micro_batch_size
        return slice(first, first + micro_batch_size)


class FieldSize(NamedTuple):
    """What a field costs to read and to send."""

    name: str
    sample_bytes: int  # of one sample, decoded
    placement_idx: int = 0  # the layer whose pipeline stage holds it
    read_parts: int = 1  # with "every_rank", each tensor-parallel rank reads 1 / read_parts of the field


class NodeTraffic(NamedTuple):
    """What one batch costs a node."""

    samples_read: int  # samples that its ranks read and decode; a sample that two ranks read counts twice
    bytes_read: int  # of these samples, decoded
    bytes_received: int  # from rank 0 over the network
    bytes_sent: int  # to the other nodes
    bytes_kept: int  # memory of the batch on the node


def node_traffic(plan: ReadPlan, node: int, fields: Sequence[FieldSize], micro_batch_size: int) -> NodeTraffic:
    """Compute what a batch costs a node."""
    rows = sum(len(plan.shards_read_by(rank)) for rank in plan.ranks_of(node)) * micro_batch_size
    if plan.readers == "every_rank":
        read = rows * sum(field.sample_bytes // field.read_parts for field in fields)
        return NodeTraffic(rows, read, 0, 0, read)
    whole = sum(field.sample_bytes for field in fields)
    if rows:
        others = range(1, plan.mesh.num_nodes) if plan.readers == "rank0" else ()
        sent = sum(_received(plan, other, fields, micro_batch_size) for other in others)
        kept = len(plan.shards_in_memory_of(node)) * micro_batch_size * whole
        return NodeTraffic(rows, rows * whole, 0, sent, kept)
    received = _received(plan, node, fields, micro_batch_size)
    return NodeTraffic(0, 0, received, 0, received)


def _received(plan: ReadPlan, node: int, fields: Sequence[FieldSize], micro_batch_size: int) -> int:
    sent = sum(field.sample_bytes for field in fields if plan.is_sent_to(node, field.placement_idx))
    return len(plan.shards_of_node(node)) * micro_batch_size * sent


def times_read(plan: ReadPlan) -> float:
    """How often a sample is read and decoded, over all nodes, on average."""
    readers = (len(plan.shards_read_by(rank)) for rank in range(plan.mesh.world_size))
    return sum(readers) / plan.mesh.data_parallel_size
