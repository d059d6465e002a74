"""`DataLoader`: a loader with the arguments of PyTorch's DataLoader, on any mesh."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Mapping
from types import GenericAlias
from typing import TYPE_CHECKING, Any

from libai_data.data.attributes import attribute_of, has_attribute
from libai_data.data.random.global_generators import warn_once
from libai_data.data.samplers.dealt import DealtIndices
from libai_data.data.samplers.listed import known_length
from libai_data.data.samplers.sampler import StreamSampler
from libai_data.data.transforms.batch import rows_together
from libai_data.delivery.shared_loader import SharedLoader
from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import BATCH_SIZE, FLAG, Rule, check, or_none, refuse_unknown, with_python_numbers
from libai_data.iterables.from_iterable import DRAWING, draws_in, from_iterable
from libai_data.iterables.iterable_loader import IterableLoader
from libai_data.iterables.kinds import dataset_name, has_index
from libai_data.loader.batch_loader import BatchLoader
from libai_data.loader.collate import Collator
from libai_data.loader.default_collate import default_collate
from libai_data.loader.shared_arguments import read_ahead_of_all
from libai_data.mesh.current import get_data_parallel_rank, get_data_parallel_size, is_main_process

_RULES = {
    "batch_size": or_none(BATCH_SIZE),
    "global_batch_size": or_none(BATCH_SIZE),
    "prefetch_factor": or_none(BATCH_SIZE),
    "shuffle": or_none(FLAG),
    "drop_last": FLAG,
    "pin_memory": FLAG,
    "persistent_workers": FLAG,
    "in_order": FLAG,
    "generator": or_none(
        Rule(
            "a Generator of OneFlow or PyTorch",
            lambda value: hasattr(value, "initial_seed") and not isinstance(value, type),
        )
    ),
    "multiprocessing_context": or_none(
        Rule(
            "'spawn', 'fork' or 'forkserver', or a context of these",
            lambda value: value in ("auto", "spawn", "fork", "forkserver") or hasattr(value, "get_start_method"),
        )
    ),
}
_OWN_NAMES = {"generator": "seed", "prefetch_factor": "prefetch", "multiprocessing_context": "start_method"}
"""Arguments of PyTorch's DataLoader for which this package has another name, too."""

if TYPE_CHECKING:  # Type checkers see the methods of the loader that `__new__` returns.

    class _Made(BatchLoader):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            """Not called."""

else:
    _Made = object


class DataLoader(_Made, metaclass=ABCMeta):
    """Makes a loader of a dataset or an iterable; the arguments are those of PyTorch's DataLoader.

    Each `iter(loader)` is the next epoch, in a new order if it is shuffled. Batches are the same on any mesh
    and with any workers, and `state_dict` resumes exactly. All loaders of this package count as instances.

    A loader has the attributes of PyTorch's loaders, such as `batch_size`, `dataset` and `drop_last`. `sampler` is the
    argument, or None; `batch_sampler` is the order that the loader reads, or None for an iterable.

    Args:
        dataset: returns samples by index, or is an iterable of samples (see `from_iterable`).
        batch_size: samples of a batch for one data-parallel rank; None if each item of the dataset is a batch of all
            ranks.
        shuffle: use another order in each epoch.
        sampler: yields the index of each sample of an epoch, for all ranks together; only rank 0 iterates over it. If
            the job is to resume, the sampler's own `seed` or `generator` must decide the order.
        batch_sampler: yields lists of indices for this data-parallel rank; or a sampler of this package.
        num_workers: processes that read. For an iterable, set `num_shards` too; with 0, a thread reads it ahead.
        collate_fn: makes a batch of a list of samples; by default samples are stacked.
        pin_memory, pin_memory_device: not needed; `to_global` moves batches to the device.
        drop_last: leave out the last batch of an epoch if it is not full. By default it is short, and padded by at most
            `data_parallel_size - 1` rows so that all ranks have equally many; `batch_info(batch).valid` says how many
            rows count.
        timeout: seconds after which a worker that is busy with one task counts as hung; 0 waits forever, as in PyTorch.
        worker_init_fn: called in each worker process with its number.
        multiprocessing_context: "spawn" or "fork", or a context of these; by default whichever fits the dataset.
        generator: its initial seed is used as `seed`.
        prefetch_factor: batches that each worker reads ahead; all together, at most 256.
        persistent_workers: has no effect; workers always live until `close`.
        in_order: has no effect; batches always come in order.
        global_batch_size: samples of a batch of all ranks, instead of `batch_size`.
        seed: decides the order, and what random transforms draw.
        readers: which ranks read: "every_rank", "node" or "rank0"; see `ReadPlan`.
        weights: draw samples by these weights, one of at least 0 for each sample; replaces a WeightedRandomSampler.
        num_samples: with weights, number of draws in an epoch; by default the number of samples in the dataset.
        replacement: with weights, whether an epoch may repeat a sample; if False, set `num_samples`.
        lanes: number of lanes that read shard file by shard file; see docs/order.md.
        block: with lanes, number of shard files that a lane shuffles together; by default 4.
        **options: further arguments of `from_iterable`, such as `fields`, and of `BatchLoader`, such as `on_error`.

    Raises:
        ConfigError: Arguments are out of range, or exclude each other.
    """

    sampler: Any
    num_workers: int
    collate_fn: Any
    pin_memory: bool
    drop_last: bool
    timeout: float
    worker_init_fn: Any
    generator: Any
    multiprocessing_context: Any
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool

    @with_python_numbers
    def __new__(
        cls,
        dataset: Any,
        batch_size: Any = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Collator | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 600.0,
        worker_init_fn: Any = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        global_batch_size: int | None = None,
        seed: int = 0,
        readers: str = "every_rank",
        weights: Any = None,
        num_samples: int | None = None,
        replacement: bool = True,
        lanes: int | None = None,
        block: int | None = None,
        **options: Any,
    ) -> DataLoader:
        kept = {name: value for name, value in locals().items() if name in DataLoader.__annotations__}
        takers = DataLoader.__new__, from_iterable, BatchLoader
        refuse_unknown("DataLoader", options, *takers, given=("cls", "source", "micro_batch_size"))
        is_list = hasattr(batch_size, "__iter__") and not isinstance(batch_size, str)
        if batch_sampler is None and is_list and getattr(batch_size, "ndim", None) != 0:
            batch_size, batch_sampler = 1, batch_size
        check(_RULES, **locals())
        drawing = draws_in(locals())
        if isinstance(sampler, StreamSampler):
            sampler, batch_sampler = None, sampler
        _refuse_pairs(
            sampler,
            batch_sampler,
            batch_size=batch_size not in (1, None),
            global_batch_size=global_batch_size is not None,
            shuffle=bool(shuffle),
            drop_last=drop_last,
            **dict.fromkeys(drawing, True),
        )
        if pin_memory:
            _warn("DataLoader: pin_memory is not needed; to_global moves batches to the device of the mesh")
        if not in_order:
            _warn("DataLoader: in_order=False has no effect; batches always have one order, so that a run can resume")
        own = {**options, **({"seed": seed} if seed else {})}
        for name, value in kept.items():
            if value is not None and _OWN_NAMES.get(name) in own:
                raise ConfigError(
                    f"DataLoader: {name} and {_OWN_NAMES[name]} are two names of one argument; remove one of them"
                )
        if drop_last and options.get("ends", "drop") != "drop":
            raise ConfigError(f"DataLoader: ends={options['ends']!r} contradicts drop_last=True; remove one of them")
        if generator is not None:
            seed = int(generator.initial_seed())
        if multiprocessing_context is not None:
            options["start_method"] = _start_method(multiprocessing_context)
        if worker_init_fn is not None:
            options["worker_init_fn"] = worker_init_fn
        if prefetch_factor is not None:
            options.setdefault("prefetch", read_ahead_of_all(prefetch_factor, num_workers))
        if global_batch_size is not None:
            batch_size = _rows_of_rank(global_batch_size)
        options.update(num_workers=num_workers, collate_fn=collate_fn, timeout=timeout, seed=seed)
        if not has_index(dataset) and (callable(dataset) or has_attribute(dataset, "__iter__")):
            for name, value in (("sampler", sampler), ("batch_sampler", batch_sampler)):
                if value is not None and not isinstance(value, StreamSampler):
                    raise ConfigError(
                        f"{name} names samples by their index, but {dataset_name(dataset)} is a stream without an "
                        f"index; remove {name}"
                    )
        together = rows_together(options.get("mixup_func"), options.get("batch_transform"))
        if sampler is not None:
            if batch_size is None:
                raise ConfigError(
                    "batch_size is None, but a sampler names single samples; give a batch_size, or pass a sampler of "
                    "lists as batch_sampler (a dataset with __getitems__ gets each list)"
                )
            if has_attribute(sampler, "weights"):
                _warn(
                    f"DataLoader: rank 0 draws all indices of the {type(sampler).__name__}, and a resume draws them "
                    "again; weights=sampler.weights needs neither, and works with every read mode"
                )
            place = get_data_parallel_rank(), get_data_parallel_size()
            batch_sampler = DealtIndices(sampler, batch_size, *place, drop_last, known_length(dataset), together)
        if batch_sampler is not None:
            if readers != "every_rank":
                raise ConfigError(
                    f"readers={readers!r}: with your own sampler, each rank reads its own samples; use shuffle or "
                    "weights, or readers='every_rank'"
                )
            refuse_unknown("a DataLoader with a sampler", options, BatchLoader, given=())
            return _with_attributes(BatchLoader(dataset, batch_sampler, **options), dataset, kept)
        loader = from_iterable(
            dataset,
            batch_size,
            batches=options.pop("batches", True if batch_size is None else None),
            ends=options.pop("ends", "drop" if drop_last else "short"),
            shuffle=bool(shuffle),
            readers=readers,
            **drawing,
            **options,
        )
        return _with_attributes(loader, dataset, kept)

    # Annotations of PyTorch programs name the type of the batches, as in `DataLoader[Any]`.
    __class_getitem__ = classmethod(GenericAlias)  # type: ignore[var-annotated]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise TypeError(
            "DataLoader makes loaders of several classes; wrap a loader instead of deriving from DataLoader"
        )


for _kind in (BatchLoader, SharedLoader, IterableLoader):
    DataLoader.register(_kind)


def _with_attributes(loader: Any, dataset: Any, arguments: Mapping[str, Any]) -> Any:
    """Set the attributes of PyTorch's loaders that other libraries read; returns the loader."""
    for name, value in {"dataset": dataset, "batch_sampler": None}.items():
        if not hasattr(loader, name):
            setattr(loader, name, value)
    for name, value in {**arguments, "collate_fn": arguments["collate_fn"] or default_collate}.items():
        setattr(loader, name, value)
    return loader


def _refuse_pairs(sampler: Any, batch_sampler: Any, **given: bool) -> None:
    """Refuse arguments that exclude each other; `given` has whether the user set each of the other arguments."""
    who, excluded = "batch_sampler", []
    if batch_sampler is not None:
        excluded = [name for name in given if given[name]] + ["sampler"] * (sampler is not None)
    elif sampler is not None:
        who, excluded = "sampler", [name for name in ("shuffle", *DRAWING) if given.get(name)]
    if not excluded and given["global_batch_size"] and given["batch_size"]:
        who, excluded = "global_batch_size", ["batch_size"]
    if excluded:
        raise ConfigError(
            f"DataLoader: {who} already decides {' and '.join(excluded)}; remove {' and '.join(excluded)}"
        )
    if has_attribute(sampler, "num_replicas"):
        raise ConfigError(
            f"sampler is a {type(sampler).__name__}, which splits samples over ranks. Remove it and set "
            f"shuffle={attribute_of(sampler, 'shuffle') is not False}: the loader splits the samples over the mesh"
        )
    inner = attribute_of(batch_sampler, "sampler")
    place = attribute_of(inner, "rank"), attribute_of(inner, "num_replicas")
    if place not in ((None, None), (get_data_parallel_rank(), get_data_parallel_size())):
        raise ConfigError(
            f"the sampler of batch_sampler is a {type(inner).__name__} for rank {place[0]} of {place[1]}, but this is "
            f"data-parallel rank {get_data_parallel_rank()} of {get_data_parallel_size()}; give it rank and "
            "num_replicas of the data axis, or use shuffle=True, with which the loader splits the samples"
        )


def _warn(message: str) -> None:
    """Log a warning once, on rank 0 only, because all ranks have the same arguments."""
    if is_main_process():
        warn_once(message)


def _rows_of_rank(global_batch_size: int) -> int:
    ranks = get_data_parallel_size()
    if global_batch_size % ranks:
        raise ConfigError(
            f"global_batch_size is {global_batch_size}; {ranks} data-parallel ranks cannot share it evenly"
        )
    return global_batch_size // ranks


def _start_method(context: Any) -> str:
    name = context if isinstance(context, str) else context.get_start_method()
    if name == "forkserver":
        _warn("DataLoader: forkserver is replaced by spawn, which starts as quickly here")
        return "spawn"
    return str(name)
