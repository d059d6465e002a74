"""`from_iterable`: makes a loader of anything that yields samples or batches, or returns them by index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from libai_data.config import LazyCall, instantiate
from libai_data.config.instantiate import instantiate_data
from libai_data.data.attributes import attribute_of, has_attribute
from libai_data.data.datasets.combine import length_of
from libai_data.data.items import ArgumentNames
from libai_data.data.random.global_generators import warn_once
from libai_data.data.samplers import CyclicSampler, SingleRoundSampler
from libai_data.data.samplers.single_round import ShortEndSampler
from libai_data.data.samplers.transform_rounds import TransformRounds
from libai_data.data.transforms.batch import BatchTransform, rows_together
from libai_data.delivery.build import build_loader
from libai_data.delivery.read_plan import ReadPlan
from libai_data.delivery.shared_loader import call_on, loader_for
from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import (
    BATCH_SIZE,
    FLAG,
    check,
    one_of,
    or_none,
    refuse_unknown,
    whole,
    with_python_numbers,
)
from libai_data.iterables.collation import PieceCollator
from libai_data.iterables.iterable_loader import IterableLoader, SourceSummary
from libai_data.iterables.iterable_source import IndexedBatches, Source
from libai_data.iterables.kinds import dataset_name, is_map_style
from libai_data.iterables.packed_stream import source_of
from libai_data.iterables.rows import ReadingOptions
from libai_data.iterables.sharded_stream import ShardedSource, Sharding
from libai_data.iterables.stream import IterableStream, TakenRows
from libai_data.loader.batch_loader import BatchLoader
from libai_data.loader.collate import Collator, trivial_batch_collator
from libai_data.loader.failures import ErrorPolicy, FailureLog
from libai_data.loader.schema import Overrides
from libai_data.loader.shared_arguments import RULES
from libai_data.mesh.current import get_mesh

if TYPE_CHECKING:
    from libai_data.iterables.data_loader import DataLoader

ENDS = ("short", "pad", "drop", "cycle")

_DECIDED = (
    *("dataset", "sampler", "batch_sampler", "train_batch_size", "test_batch_size"),
    *("consumed_samples", "dataset_mixer"),
)
"""Arguments of the builders that follow from those of `from_iterable`."""

DRAWING = {"weights": None, "num_samples": None, "replacement": True, "lanes": None, "block": None}
"""Arguments that decide which samples of a dataset are drawn, and their defaults."""

_RULES = {
    **RULES,
    "micro_batch_size": or_none(BATCH_SIZE),
    "batches": or_none(FLAG),
    "ends": one_of(*ENDS),
    "shuffle": FLAG,
    "num_shards": or_none(BATCH_SIZE),
    "shuffle_buffer": whole(0, 2**31 - 1),
}


@with_python_numbers
def from_iterable(
    source: Any,
    micro_batch_size: int | None = None,
    *,
    fields: Sequence[str] | None = None,
    batches: bool | None = None,
    ends: str = "short",
    shuffle: bool = False,
    seed: int = 0,
    num_workers: int = 0,
    readers: str = "every_rank",
    collate_fn: Collator | None = None,
    layouts: Overrides | None = None,
    mixup_func: Any = None,
    prefetch: int = 4,
    timeout: float = 600.0,
    check_every: int = 100,
    weights: Any = None,
    num_samples: int | None = None,
    replacement: bool = True,
    lanes: int | None = None,
    block: int | None = None,
    num_shards: int | None = None,
    shuffle_buffer: int = 0,
    **loader_options: Any,
) -> DataLoader:
    """Make a loader of an iterable of samples or batches.

    A source with a length and an index (a list, a torch dataset, a Grain MapDataset, a Hugging Face dataset) becomes a
    `DataLoader`. Any other source is a stream: each rank that reads iterates over the stream once, in the stream's
    order, and the loader splits the rows over the data-parallel ranks. Collective with readers "node" and "rank0".

    Args:
        source: an iterable, a function that returns one (a generator function, a factory), or its config (`LazyCall`).
            A function may have the parameters `epoch`, `shard` and `num_shards`. With `shard`, it is called for each
            data-parallel rank, and must yield only the samples of that rank.
        micro_batch_size: samples of a batch for one data-parallel rank. With None, each batch of the iterable is a
            global batch.
        fields: names for the values of tuples, or for a single tensor. If samples have names, the fields to use.
        batches: whether the iterable yields batches. By default loaders of torch, OneFlow, DALI and FFCV do, and
            pipelines of WebDataset or Grain with a batching stage.
        ends: what happens to the last rows of an epoch if they do not fill a global batch. "short" makes a smaller
            batch. "pad" repeats the last row until the batch is full. With both, `batch_info(batch).valid` says how
            many rows count; "short" repeats at most `data_parallel_size - 1` rows, so that all ranks have equally many.
            "drop" drops these rows. "cycle" makes an endless stream: the source restarts within the batch. A function
            with `shard` needs "drop" or "cycle".
        shuffle: use another order in each epoch, of the samples or of the batches. Only for sources with an index.
        seed: decides this order, and what random transforms draw.
        num_workers: processes that read the samples, or the shards of a stream. With 0, a thread reads a stream ahead.
        readers: which ranks read: "every_rank", "node" or "rank0"; see `ReadPlan`.
        collate_fn: makes a batch of a list of samples; by default `default_collate`. With `fields` and a `Mixup`,
            tuples arrive as dicts of these names.
        layouts: field name -> {"sbp_list": [...], "placement_idx": int}; nested fields are named `outer.inner`.
        mixup_func: applied to each batch by the trainer, or its config.
        prefetch: batches to read ahead.
        timeout: seconds without a sample after which a stream or a worker counts as hung; 0 waits forever.
        check_every: the ranks compare their batches after this many batches; 0 never compares.
        weights, num_samples, replacement: draw samples by weights (see `CyclicSampler`). Only for sources with an
            index.
        lanes, block: read shard file by shard file (see `CyclicSampler`). Only for sources with an index.
        num_shards: read a stream in this many shards, one row of each shard in turn. A function gets `shard` and
            `num_shards`. Any other source must call `get_worker_info` (of this package, or of PyTorch). The workers
            share the shards.
        shuffle_buffer: size of the buffer from which the next sample of a stream is drawn, by `seed` and the epoch.
        **loader_options: for sources with an index, further arguments of `BatchLoader`; for streams, `worker_type`,
            `worker_init_fn`, `on_error` ("raise", or "skip" to leave out rows that fail) and `replacement_budget`.

    Returns:
        A loader with the methods of `DataLoader`.

    Raises:
        ConfigError: An argument is out of range, or does not fit the source.
        PeerError: The rank that reads for this rank could not open the source.
    """
    refuse_unknown("from_iterable", loader_options.keys() - set(_DECIDED), from_iterable, BatchLoader, given=_DECIDED)
    plan = ReadPlan(get_mesh(), readers)
    collate_fn, mixup_func = instantiate(collate_fn), instantiate(mixup_func)
    check(_RULES, **locals())
    if collate_fn is trivial_batch_collator:
        collate_fn = None
    drawing = draws_in(locals())
    shared = {"layouts": layouts, "mixup_func": mixup_func, "check_every": check_every}
    skips = loader_options.get("on_error") == "skip"
    sharding = None
    worker_type, init = (loader_options.get(name) for name in ("worker_type", "worker_init_fn"))
    check(_RULES, worker_type=worker_type or "process", worker_init_fn=init)
    if num_shards is not None or num_workers or shuffle_buffer:
        sharding = Sharding(num_shards, shuffle_buffer, seed, num_workers, worker_type or "process", init, skips)
    opened, summary = _open(plan, source, batches, sharding, skips, shuffle, seed)
    if summary.is_map_style:
        for name, given in (("num_shards", num_shards), ("shuffle_buffer", shuffle_buffer)):
            if given:
                raise ConfigError(
                    f"{name}={given} is for streams; {summary.name} gives samples by their index, which shuffle=True "
                    "shuffles and num_workers share"
                )
        options = {"num_workers": num_workers, "prefetch": prefetch, "timeout": timeout, **shared, **loader_options}
        options.update(collate_fn=collate_fn, fields=fields)
        arguments = {"micro_batch_size": _needed(micro_batch_size), "seed": seed, **drawing}
        return _map_style(opened, arguments, ends, shuffle, readers, options)
    for name in ("worker_type", "worker_init_fn"):  # Without workers they have no effect, as for datasets.
        loader_options.pop(name, None)
    if loader_options.get("start_method") in ("auto", "spawn"):  # Processes that read streams are always spawned.
        del loader_options["start_method"]
    policy = {name: loader_options.pop(name) for name in ("on_error", "replacement_budget") if name in loader_options}
    if policy.get("on_error") == "quarantine":
        raise ConfigError(
            "on_error='quarantine' lists samples by their index, and a stream has none; use on_error='skip'"
        )
    failures = FailureLog(ErrorPolicy(**policy), summary.name)
    _refuse_for_streams(shuffle=shuffle and not summary.is_shuffled, **drawing, **loader_options)
    if num_workers > (num_shards or 1):
        warn_once(
            f"only {num_shards or 1} of num_workers={num_workers} workers read {summary.name}, because it has no more "
            f"shards. Set num_shards={num_workers} or more, and let the source yield the shard that get_worker_info() "
            "names"
        )
    if summary.batches and collate_fn is not None:
        raise ConfigError(f"collate_fn makes batches of samples, but {summary.name} yields batches; remove collate_fn")
    if summary.batches and _prepares_samples(mixup_func):
        raise ConfigError(
            f"{type(mixup_func).__name__} prepares samples, but {summary.name} yields batches; load its samples instead"
        )
    if summary.takes_shard and ends in ("short", "pad"):
        raise ConfigError(
            f"ends={ends!r} keeps the last rows of {summary.name} by marking the first rows of a batch as valid, "
            "but each of its shards may end at another row. Use ends='drop' to drop the rows that do not fill a global "
            "batch, ends='cycle' for an endless stream, or a function without shard"
        )
    if not summary.batches or summary.takes_shard:
        _needed(micro_batch_size)
    reading = ReadingOptions(fields, ends == "cycle", prefetch, timeout, failures)
    words = None if sharding is None else sharding.words()
    shared["seed"] = seed
    return _stream(plan, opened, summary, micro_batch_size, ends, reading, collate_fn, shared, words)


def draws_in(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `DRAWING` that are not the defaults."""
    return {name: arguments[name] for name, default in DRAWING.items() if arguments[name] is not default}


def _open(
    plan: ReadPlan, source: Any, batches: bool | None, sharding: Sharding | None, skips: bool, shuffle: bool, seed: int
) -> tuple[Any, SourceSummary]:
    """Open the source on the ranks that read it (None elsewhere), and send all ranks a summary, or the error."""
    opened: Any = None

    def open_here() -> SourceSummary:
        nonlocal opened
        thing = instantiate_data(source)
        if is_map_style(thing) and not batches:
            if not length_of(thing):
                raise ConfigError(f"{type(thing).__name__} is empty; there is nothing to load")
            opened = thing
            return SourceSummary(True, type(thing).__name__, dataset_name(thing))
        by_index = is_map_style(thing) and (shuffle or not has_attribute(thing, "__iter__"))
        if by_index:
            thing = IndexedBatches(thing, shuffle, seed)
        opened = ShardedSource(thing, batches, sharding) if sharding else source_of(thing, batches, skips)
        length = None
        if plan.readers != "every_rank":
            with suppress(Exception):  # Not every source has a length, and not every user needs it.
                length = opened.length()
        kinds = opened.batches, opened.takes_shard, by_index
        return SourceSummary(False, opened.name, dataset_name(thing), *kinds, length, len(opened.batch_runs) > 1)

    summary = (
        open_here() if plan.readers == "every_rank" else call_on(plan.reading_ranks, open_here, "open the source")[0]
    )
    return opened, summary


def _needed(micro_batch_size: int | None) -> int:
    if micro_batch_size is None:
        raise ConfigError(
            "micro_batch_size is missing: the source yields samples; set how many samples a batch of one rank has"
        )
    return micro_batch_size


def _refuse_for_streams(**options: Any) -> None:
    for name, value in options.items():
        if name != "shuffle" or value:
            raise ConfigError(
                f"{name}={value!r:.100} is for sources that give samples by their index, with __getitem__ and __len__. "
                "A stream has its own order; shuffle_buffer=1000 shuffles it"
            )


def _map_style(
    dataset: Any, arguments: dict[str, Any], ends: str, shuffle: bool, readers: str, options: dict[str, Any]
) -> Any:
    for name in options:
        if name in _DECIDED:
            raise ConfigError(
                f"from_iterable has no argument '{name}': use micro_batch_size, shuffle, seed and ends; for your own "
                "sampler, use DataLoader(dataset, batch_sampler=...)"
            )
    if ends == "cycle":
        sampler = LazyCall(CyclicSampler)(shuffle=shuffle)
    else:
        together = rows_together(options.get("mixup_func"), options.get("batch_transform"))
        sampler = LazyCall(_rounds)(shuffle=shuffle, ends=ends, together=together)
    return build_loader(lambda: dataset, sampler, readers, arguments, **options)


def _prepares_samples(mixup_func: Any) -> bool:
    """Whether a batch transform changes samples before they are stacked, and so needs their names."""
    return getattr(type(mixup_func), "prepared", BatchTransform.prepared) != BatchTransform.prepared


def _rounds(dataset: Any, ends: str, together: int, **arguments: Any) -> Any:
    """The sampler of finite epochs of a dataset, or of a placeholder; a batch transform needs `together` rows."""
    if attribute_of(dataset, "is_stream_transform", False):
        if "weights" in arguments:
            raise ConfigError("weights is for single samples; give the filter or packer a dataset without weights")
        return TransformRounds(dataset, ends=ends, together=together, **arguments)
    if ends != "short":
        return SingleRoundSampler(dataset, drop_last=ends == "drop", **arguments)
    sampler = ShortEndSampler(dataset, **arguments)
    sampler.together = together
    return sampler


def _stream(
    plan: ReadPlan,
    source: Any,
    summary: SourceSummary,
    micro_batch_size: int | None,
    ends: str,
    reading: ReadingOptions,
    collate_fn: Any,
    options: dict[str, Any],
    words: dict[str, int] | None,
) -> Any:
    mesh = plan.mesh
    size = None if micro_batch_size is None else micro_batch_size * mesh.data_parallel_size
    own: IterableStream | None = None  # of this rank, if it reads
    # By default the collator names the values of tuples.
    are_named = _prepares_samples(options["mixup_func"]) and not isinstance(reading.names, ArgumentNames)
    open_rows = partial(TakenRows, source, reading)  # Only ranks that read call this.

    def make_stream(dataset: Any, shards: tuple[int, ...]) -> IterableStream:
        nonlocal own
        rows = dataset if isinstance(dataset, TakenRows) else None
        together = rows_together(options["mixup_func"])
        stream = IterableStream(rows, micro_batch_size, shards, mesh.data_parallel_size, ends, words, together)
        own = own if rows is None else stream
        return stream

    def make_loader(dataset: Any, stream: Any) -> BatchLoader:
        fields = reading.names if are_named else None
        return BatchLoader(
            dataset, stream, collate_fn=PieceCollator(reading.names, collate_fn), fields=fields, **options
        )

    compared = {"batch size": micro_batch_size, "fields": reading.names, "ends": ends, "collate_fn": collate_fn}
    compared.update({**options, **(words or {})})
    inner = loader_for(plan, open_rows, make_stream, make_loader, options["mixup_func"], compared)
    count = partial(_batches_in_epoch, source, summary, size, ends)
    return IterableLoader(inner, own, reading.names, summary, len(plan.reading_ranks), count)


def _batches_in_epoch(source: Source | None, summary: SourceSummary, size: int | None, ends: str) -> int:
    """The number of batches of `size` rows (None: the source's own) in an epoch; a TypeError if it is not known."""
    items = summary.length if summary.length is not None or source is None else source.length()
    if items is None or (summary.batches and size is not None):
        raise TypeError(f"the number of batches that {summary.name} yields is unknown; iterate without len(loader)")
    if size is None:
        return items - (ends == "drop" and summary.has_short_batch)
    return items // size if ends == "drop" else -(-items // size)
