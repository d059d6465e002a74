"""The streamed shards of a pass: found in the dataset, fetched ahead, and released when they were read."""

from __future__ import annotations

from functools import partial
from typing import Any

from libai_data.data.datasets.streamed_shards import StreamedShards
from libai_data.data.samplers.lane_order import LaneOrder
from libai_data.data.samplers.sampler import StreamSampler
from libai_data.data.samplers.shard_plans import most_bytes_of, shard_plan_of
from libai_data.data.shard_use import BESIDE_AHEAD


def streamed_shards(dataset: Any, stream: Any) -> StreamedShards | None:
    """Find the streamed shards that a stream reads; None if there are none."""
    shards = StreamedShards(dataset)
    return shards if shards.sources and isinstance(stream, StreamSampler) else None


def fetch_ahead(shards: StreamedShards, stream: StreamSampler, position: int, batches: int) -> None:
    """Fetch the shards from a position on before they are needed, if a loader reads so many batches ahead."""
    order = stream.order
    if not isinstance(order, LaneOrder) and (order.shuffle or shards.is_shuffled):
        shards.check_holds_all()
    plan = shard_plan_of(stream, position, shards)
    if plan is not None:
        shards.read_ahead(plan, partial(most_bytes_of, stream, batches + BESIDE_AHEAD, shards))


def report_reached(shards: StreamedShards, stream: StreamSampler, position: int) -> int:
    """Report to the streamed shards which batch was handed out; returns the next position to report."""
    batch = stream.batch_of(position)
    return position if batch is None else stream.position_of_batch(shards.reached(batch))
