"""Which streamed shards the reader of a sampler needs, and when."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np

from libai_data.data.datasets.blend import blend_of
from libai_data.data.datasets.shard_lengths import shard_lengths_of
from libai_data.data.datasets.streamed_shards import StreamedShards
from libai_data.data.samplers.lane_order import LaneOrder
from libai_data.data.samplers.sampler import StreamSampler
from libai_data.data.shard_use import ShardPlan

_AT_ONCE = 4096
"""Most samples whose indices are computed at once."""


def shard_plan_of(sampler: StreamSampler, position: int, shards: StreamedShards) -> ShardPlan | None:
    """The streamed shards that this reader needs from a position on; None if the position's place is not known.

    The plan numbers batches as `batch_of` does.
    """
    order, size, first = sampler.order, sampler.global_batch_size, sampler.batch_of(position)
    if first is None:
        return None
    if isinstance(order, LaneOrder):
        rows = np.arange(size) if sampler.reads_all_lanes else sampler.rows_of(size)
        uses = order.shard_uses(range(int(rows[0]), int(rows[-1]) + 1), size, first)
        plan = ShardPlan(uses, lambda shard, batch: order.next_use(shard, size, batch))
        return shards.plan_of(plan, shard_lengths_of(sampler.dataset))
    epoch = -(-order.epoch_size // size)
    return ShardPlan(shards.uses_in(_samples_ahead(sampler, first)), lambda shard, batch: batch + epoch)


def most_bytes_of(sampler: StreamSampler, batches: int, shards: StreamedShards) -> int:
    """The most bytes of streamed shards that any reader with as many rows as this one may need at once, if so many
    consecutive batches are read at once."""
    order, size, rows = sampler.order, sampler.global_batch_size, len(sampler.rows_of(sampler.global_batch_size))
    if not isinstance(order, LaneOrder):
        blend = blend_of(sampler.dataset)
        return shards.most_in_order(batches * size, 1 if blend is None else len(blend.sizes))
    sizes = shards.sizes_of(shard_lengths_of(sampler.dataset))
    rows = size if sampler.reads_all_lanes else rows
    firsts = range(0, size, rows)
    return max(order.most_bytes(range(first, first + rows), size, batches, sizes) for first in firsts)


def _samples_ahead(sampler: StreamSampler, first: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The samples that this reader may read, several batches at a time, from batch `first` on without end. Yields the
    batch (see `batch_of`) and the index of each sample, int64 [n] each."""
    size = sampler.global_batch_size
    # With a stream transform, the outputs of this rank may need any sample.
    rows = np.arange(size) if sampler.makes_outputs else sampler.rows_of(size)
    # Less than an epoch at a time: otherwise a shard that comes again would count as in use all the time.
    batches = max(1, min(_AT_ONCE // len(rows), sampler.order.epoch_size // (8 * size)))
    for start in count(first, batches):
        numbers = np.arange(start, start + batches)
        indices = sampler.order.locate((numbers[:, None] * size + rows).ravel())[1]
        yield np.repeat(numbers, len(rows)), indices
