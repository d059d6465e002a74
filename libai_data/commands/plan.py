"""The command `libai-data plan`: what a job on any number of nodes would read, keep and send, without starting it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import inf, isfinite, prod
from typing import Any

from libai_data.commands.console import config_parser, print_lines, with_ruled_head
from libai_data.commands.inspection.fields import in_words, part_of, spread, whole_shape
from libai_data.commands.inspection.step_rows import read_step
from libai_data.commands.one_rank import mesh_of, one_rank_loaders
from libai_data.config import try_get_key
from libai_data.config.lazy_config import load_config
from libai_data.data.datasets.shard_lengths import shard_lengths_of
from libai_data.data.datasets.stream_transform import StreamTransform
from libai_data.data.datasets.streamed_shards import StreamedShards
from libai_data.data.samplers.lane_order import LaneOrder
from libai_data.data.shard_use import BESIDE_AHEAD, ShardPlan, bytes_a_batch, cache_for, share_of_node
from libai_data.delivery.read_plan import READERS, FieldSize, NodeTraffic, ReadPlan, node_traffic, read_mode, times_read
from libai_data.engine.models import build_configured_tokenizer
from libai_data.errors import ConfigError, bytes_in_words, numbers_in_words
from libai_data.iterables.iterable_loader import indexed_dataset_of
from libai_data.launch.launcher import MOST_NODES, MOST_RANKS_PER_NODE
from libai_data.loader.reading import reads_parts
from libai_data.loader.schema import FieldSpec
from libai_data.loader.shared_arguments import PREFETCH, read_ahead_of_all
from libai_data.mesh.global_tensor import split_dims
from libai_data.mesh.parallel_mesh import ParallelMesh


def parser() -> argparse.ArgumentParser:
    arguments = config_parser("plan", __doc__)
    arguments.add_argument("--nodes", type=int, default=1, metavar="N", help="machines (default: %(default)s)")
    arguments.add_argument("--ranks-per-node", type=int, default=1, metavar="N", help="default: %(default)s")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 1 if the config does not fit, or samples cannot be read."""
    asked = parser().parse_intermixed_args(argv)
    return print_lines("plan", lambda: _plan(asked))


def _plan(asked: argparse.Namespace) -> list[str]:
    for name, most in (("nodes", MOST_NODES), ("ranks_per_node", MOST_RANKS_PER_NODE)):
        if not 1 <= getattr(asked, name) <= most:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(asked, name)}; it must be 1 to {most}")
    cfg = load_config(asked.config, asked.opts)
    mesh = mesh_of(cfg, asked.nodes * asked.ranks_per_node, asked.nodes)
    opened = one_rank_loaders(cfg, mesh.data_parallel_size, tokenizer=build_configured_tokenizer(cfg))
    try:
        (loader,) = opened.loaders
        rows = read_step(opened, "train", loader, 0, mesh.data_parallel_size, 1, rows=1)
        dataset, stream = indexed_dataset_of(loader), getattr(loader, "stream", None)
    finally:
        opened.close()
    fields = tuple(
        FieldSpec(name, values[0].dtype, values[0].shape, rows.layouts[name]) for name, values in rows.values.items()
    )
    asked_for = {
        key: try_get_key(cfg, f"dataloader.train.{key}") for key in ("num_workers", "prefetch", "prefetch_factor")
    }
    of_all = read_ahead_of_all(asked_for["prefetch_factor"] or 1, asked_for["num_workers"] or 0)
    ahead = max(asked_for["prefetch"] or of_all, PREFETCH)
    first = opened.plan.first
    job = JobPlan(mesh, first.micro_batch_size, fields, reads_parts(dataset))
    readers = read_mode(try_get_key(cfg, "dataloader.train.readers") or "every_rank")
    streamed = streaming_report(dataset, stream, mesh, first.micro_batch_size, readers, ahead)
    return report(job, first.num_accumulation_steps, readers) + streamed


_NODES_SHOWN = 4
_WORTH_SHARING = 1.5  # if every_rank reads a sample this many times as often as node, node is recommended


@dataclass(frozen=True)
class JobPlan:
    """A job on a mesh, with `micro_batch_size` rows in one batch of one data-parallel rank."""

    mesh: ParallelMesh
    micro_batch_size: int
    fields: tuple[FieldSpec, ...]
    reads_parts: bool = False

    def sizes(self) -> list[FieldSize]:
        """Bytes, layer and number of read parts of each field."""
        tensor = self.mesh.tensor_parallel_size
        return [
            FieldSize(
                field.name,
                prod(field.shape) * field.dtype.itemsize,
                field.layout.placement_idx,
                tensor if self.reads_parts and split_dims(field.layout.sbp_list)[1] is not None else 1,
            )
            for field in self.fields
        ]

    def costs(self, readers: str) -> dict[NodeTraffic, list[int]]:
        """Each different cost of a batch in one read mode, with the nodes that have this cost."""
        plan, sizes = ReadPlan(self.mesh, readers), self.sizes()
        nodes: dict[NodeTraffic, list[int]] = {}
        for node in range(self.mesh.num_nodes):
            nodes.setdefault(node_traffic(plan, node, sizes, self.micro_batch_size), []).append(node)
        return nodes

    def recommended(self) -> tuple[str, str]:
        """A read mode for data that every node can reach, and why."""
        own = ReadPlan(self.mesh, "every_rank")
        over = times_read(own) / times_read(ReadPlan(self.mesh, "node"))
        sizes = self.sizes()
        if any(size.read_parts > 1 for size in sizes):
            whole, parts = (
                sum(size.sample_bytes // (size.read_parts if cut else 1) for size in sizes) for cut in (0, 1)
            )
            return "every_rank", (
                f"the dataset reads parts of samples: a rank reads {parts:,} bytes of each sample instead of {whole:,}"
            )
        if over >= _WORTH_SHARING:
            return "node", f"with every_rank, the ranks of a node read and decode each sample {over:g} times"
        return "every_rank", "almost no sample is read twice on a node, so sharing would save nothing"


def report(job: JobPlan, batches_a_step: int, readers: str) -> list[str]:
    """The lines of the plan, for steps of `batches_a_step` batches; `readers` is the read mode of the config."""
    mode, why = job.recommended()
    return [
        *_job(job, batches_a_step),
        "",
        *_fields(job),
        "",
        *_costs(job, batches_a_step, readers),
        "",
        *_who_reads(job, readers),
        "",
        f"Recommended: dataloader.train.readers={mode}; {why}.",
        "If only the machine of rank 0 has the data, set readers=rank0: rank 0 sends the samples to all nodes.",
    ]


def _job(job: JobPlan, batches_a_step: int) -> list[str]:
    mesh = job.mesh
    rows = job.micro_batch_size * mesh.data_parallel_size * batches_a_step
    accumulated = f" in {batches_a_step} batches" if batches_a_step > 1 else ""
    return [
        f"{mesh.world_size:,} ranks on {mesh.num_nodes:,} node(s): {mesh.sizes_in_words}; {rows:,} samples per "
        f"step{accumulated}, {job.micro_batch_size} per batch and data-parallel rank."
    ]


def _fields(job: JobPlan) -> list[str]:
    lines: list[Sequence[str]] = [
        ("field", "dtype", "a sample", "a batch, all ranks", "SBP", "rank 0 holds", "last rank", "in all")
    ]
    for field in job.fields:
        shape = whole_shape(job.micro_batch_size, field.shape, field.layout, job.mesh)
        parts = [part_of(shape, field.layout, job.mesh, rank) for rank in (0, job.mesh.world_size - 1)]
        in_all = "{:,} part(s), each on {:,} rank(s)".format(*spread(field.layout, job.mesh))
        held = ["nothing" if part is None else in_words(part, shape) for part in parts]
        lines.append(
            (field.name, str(field.dtype), str(list(field.shape)), str(list(shape)))
            + (", ".join(field.layout.sbp_list), *held, in_all)
        )
    return with_ruled_head(lines)


def _costs(job: JobPlan, batches_a_step: int, readers: str) -> list[str]:
    lines: list[Sequence[str]] = [
        (
            "readers",
            "nodes",
            "samples read",
            "of each sample, over all",
            "bytes decoded",
            "bytes received",
            "bytes sent",
            "memory a batch",
        )
    ]
    for mode in READERS:
        often = f"{times_read(ReadPlan(job.mesh, mode)):g} times"
        for cost, nodes in job.costs(mode).items():
            lines.append(
                (
                    f"{mode}{' (config)' if mode == readers else ''}",
                    numbers_in_words(nodes),
                    f"{cost.samples_read * batches_a_step:,}",
                    often,
                    _bytes(cost.bytes_read * batches_a_step),
                    _bytes(cost.bytes_received * batches_a_step),
                    _bytes(cost.bytes_sent * batches_a_step),
                    _bytes(cost.bytes_kept),
                )
            )
    return ["What a step costs each of these nodes:", *with_ruled_head(lines)]


def _who_reads(job: JobPlan, readers: str) -> list[str]:
    plan = ReadPlan(job.mesh, readers)
    lines = [
        f"Who reads (readers={readers}). Part d has the samples of data-parallel rank d: {job.micro_batch_size} "
        f"samples, from position {job.micro_batch_size} x d of the batch on."
    ]
    for node in range(min(job.mesh.num_nodes, _NODES_SHOWN)):
        ranks = plan.ranks_of(node)
        reading = {rank: plan.shards_read_by(rank) for rank in ranks}
        words = [f"rank {rank} part {numbers_in_words(parts)}" for rank, parts in reading.items() if parts]
        lines.append(
            f"  node {node} (ranks {numbers_in_words(ranks)}): {', '.join(words) or 'no rank; the node receives'}"
        )
    if job.mesh.num_nodes > _NODES_SHOWN:
        lines.append(f"  and so on, {job.mesh.num_nodes:,} nodes in all")
    return lines


def _bytes(count: float) -> str:
    return bytes_in_words(count) if count else "-"


def streaming_report(
    dataset: Any, stream: Any, mesh: ParallelMesh, rows: int, readers: str, ahead: int = 0
) -> list[str]:
    """Lines about the streaming of the first epoch; no lines if the dataset is not streamed.

    Args:
        rows: rows of a batch of one data-parallel rank.
        ahead: batches that workers read ahead.
    """
    shards = StreamedShards(dataset)
    if not shards.sources:
        return []
    sizes = shards.sizes
    title = f"Streaming {shards.name}: {len(sizes):,} shard files, {bytes_in_words(int(sizes.sum()))}."
    order = getattr(stream, "order", None)
    if not isinstance(order, LaneOrder):
        return ["", f"{title} Without lanes, each node fetches what its ranks read, when they read it."]
    size, lengths = shards.sources[0].storage.size, shard_lengths_of(dataset)
    plan, batch_size = ReadPlan(mesh, readers), rows * mesh.data_parallel_size
    batches, own_sizes = -(-order.epoch_size // batch_size), shards.sizes_of(lengths)
    # In an endless stream, the ranks of the job exchange the starts of their lanes; here is only one rank.
    reads_all_lanes = stream.reads_all_lanes and not stream.endless
    costs: dict[tuple[str, ...], list[int]] = {}
    for node in range(mesh.num_nodes):
        of_readers = [parts for rank in plan.ranks_of(node) if (parts := plan.shards_read_by(rank))]
        if not of_readers:
            continue
        spans = [
            range(batch_size) if reads_all_lanes else range(parts[0] * rows, (parts[-1] + 1) * rows)
            for parts in of_readers
        ]
        span = range(min(each.start for each in spans), max(each.stop for each in spans))
        in_lanes = ShardPlan(order.shard_uses(span, batch_size), lambda shard, batch: batch)
        of_epoch = takewhile(lambda use: use.first < batches, shards.plan_of(in_lanes, lengths).uses)
        uses = [use for use in of_epoch if use.shard != shards.none]
        needed = {use.shard for use in uses}
        enough = max(
            cache_for(
                # A loader refuses a cache without room for the largest shard, whoever reads this shard.
                max(order.most_bytes(each, batch_size, ahead + BESIDE_AHEAD, own_sizes), int(sizes.max())),
                share_of_node(len(parts), mesh.data_parallel_size, mesh.parts_of_data),
            )
            for each, parts in zip(spans, of_readers)
        )
        # The number of samples in a batch of a filter or packer is not known in advance.
        rate = inf if isinstance(dataset, StreamTransform) else bytes_a_batch(uses, sizes, max(size, enough) // 2)
        costs.setdefault(
            (
                f"{len(needed):,}",
                bytes_in_words(int(sizes[list(needed)].sum())),
                bytes_in_words(sum(int(sizes[use.shard]) for use in uses)),
                f"{enough:,} bytes",
                bytes_in_words(rate) if isfinite(rate) else "-",
            ),
            [],
        ).append(node)
    lines: list[Sequence[str]] = [
        ("nodes", "shard files", "bytes an epoch, at least", "at most", "cache that is enough", "a batch")
    ]
    lines += [(numbers_in_words(nodes), *cost) for cost, nodes in costs.items()]
    head = ["", f"{title} What the first epoch costs each of these nodes:", *with_ruled_head(lines)]
    if isinstance(dataset, StreamTransform):
        return [
            *head,
            "A batch of a filter or packer takes any number of samples, so its bytes are not known in advance.",
        ]
    return [
        *head,
        "If a node fetches the bytes of the last column in the time of one batch, only the first batch waits. This "
        f"needs a cache of {bytes_in_words(size)} (LIBAI_DATA_CACHE_SIZE), or of the size that is enough if that is "
        "less.",
    ]
