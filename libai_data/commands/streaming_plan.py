"""What a streamed source costs each node: bytes to fetch in an epoch, and disk."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from libai_data.commands.console import with_ruled_head
from libai_data.data.datasets.shard_lengths import streamed_source_of
from libai_data.data.samplers.lane_order import LaneOrder
from libai_data.data.shard_use import most_in_use
from libai_data.delivery.read_plan import ReadPlan
from libai_data.errors import bytes_in_words, numbers_in_words
from libai_data.mesh.parallel_mesh import ParallelMesh


def streaming_report(dataset: Any, order: Any, mesh: ParallelMesh, rows: int, readers: str) -> list[str]:
    """Lines about the first epoch; none for a dataset that is not streamed.

    Args:
        dataset: of the config.
        order: of its samples.
        mesh: of the job.
        rows: of a batch, of each data-parallel rank.
        readers: read mode.
    """
    source = streamed_source_of(dataset)
    if source is None:
        return []
    sizes = source.table.sizes
    title = f"Streaming {source.folder}: {len(sizes):,} shard files, {bytes_in_words(int(sizes.sum()))}."
    if not isinstance(order, LaneOrder):
        return ["", f"{title} Without lanes, each node fetches what its ranks read, when they read it."]
    plan, batch_size = ReadPlan(mesh, readers), rows * mesh.data_parallel_size
    batches = -(-order.epoch_size // batch_size)
    costs: dict[tuple[str, ...], list[int]] = {}
    for node in range(mesh.num_nodes):
        parts = sorted({part for rank in plan.ranks_of(node) for part in plan.shards_read_by(rank)})
        if not parts:
            continue
        span = range(parts[0] * rows, (parts[-1] + 1) * rows)
        uses = list(takewhile(lambda use: use.first < batches, order.shard_uses(span, batch_size)))
        shards = {use.shard for use in uses}
        costs.setdefault(
            (
                f"{len(shards):,}",
                bytes_in_words(int(sizes[list(shards)].sum())),
                bytes_in_words(sum(int(sizes[use.shard]) for use in uses)),
                bytes_in_words(2 * most_in_use(uses, sizes)),
            ),
            [],
        ).append(node)
    lines: list[Sequence[str]] = [("nodes", "shard files", "bytes an epoch, at least", "at most", "cache needed")]
    lines += [(numbers_in_words(nodes), *cost) for cost, nodes in costs.items()]
    return ["", f"{title} What the first epoch costs each of these nodes:", *with_ruled_head(lines)]
