"""What a node reads, receives and keeps for one batch, by the plan that the ranks follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from libai_data.delivery.read_plan import ReadPlan


class FieldSize(NamedTuple):
    """A field, as far as it costs something.

    Args:
        name: the field's.
        sample_bytes: of one sample, decoded.
        placement_idx: the layer whose pipeline stage holds it.
        read_parts: parts in which tensor-parallel ranks read it where each reads for itself; 1 if each reads it whole.
    """

    name: str
    sample_bytes: int
    placement_idx: int = 0
    read_parts: int = 1


class NodeTraffic(NamedTuple):
    """What one batch costs a node.

    Args:
        samples_read: samples that its ranks read and decode, a sample that two ranks read counted twice.
        bytes_read: of these samples, decoded.
        bytes_received: from rank 0 over the network.
        bytes_sent: to the other nodes.
        bytes_kept: memory that the batch takes there.
    """

    samples_read: int
    bytes_read: int
    bytes_received: int
    bytes_sent: int
    bytes_kept: int


def node_traffic(plan: ReadPlan, node: int, fields: Sequence[FieldSize], micro_batch_size: int) -> NodeTraffic:
    """What a batch costs a node.

    Args:
        plan: who reads what.
        node: which node.
        fields: of a sample.
        micro_batch_size: rows of one shard.
    """
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
    """How often a sample is read and decoded, over all nodes, on the average."""
    readers = (len(plan.shards_read_by(rank)) for rank in range(plan.mesh.world_size))
    return sum(readers) / plan.mesh.data_parallel_size
