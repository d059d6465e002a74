"""From a config to loaders: LiBai's five builders, with one implementation."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import is_dataclass
from functools import lru_cache
from itertools import accumulate
from math import inf
from numbers import Real
from types import FunctionType
from typing import Any, Callable, Optional, TypeVar

import numpy as np
from omegaconf import ListConfig

from libai_data.config import LazyCall, instantiate
from libai_data.config.instantiate import instantiate_data
from libai_data.data.attributes import has_attribute
from libai_data.data.datasets.blend import BlendedDataset
from libai_data.data.datasets.combine import ConcatDataset, Subset, length_of
from libai_data.data.datasets.document_parts import split_documents
from libai_data.data.items import fields_in
from libai_data.data.samplers import CyclicSampler, SingleRoundSampler
from libai_data.data.samplers.sampler import StreamSampler
from libai_data.delivery.read_plan import ReadPlan
from libai_data.delivery.shared_loader import Loader, loader_for
from libai_data.errors import ConfigError, DataPipelineError
from libai_data.errors.argument_rules import BATCH_SIZE, FUNCTION, Rule, check, list_of, or_none, refuse_unknown
from libai_data.loader.batch_loader import BatchLoader
from libai_data.loader.collate import Collator
from libai_data.loader.schema import Overrides, TensorPart
from libai_data.mesh.current import get_data_parallel_size, get_mesh

_PARTS = ("training", "validation", "testing")
Mixer = Callable[[list[Any]], Any]
_ENDLESS = LazyCall(CyclicSampler)(shuffle=True)
_ONE_ROUND = LazyCall(SingleRoundSampler)(shuffle=False, drop_last=False)
_ONE_SHUFFLED_ROUND = LazyCall(SingleRoundSampler)(shuffle=True, drop_last=False)

_CALL = Rule("a LazyCall", lambda value: isinstance(value, Mapping) and "_target_" in value)
_RULES = {
    "train_batch_size": BATCH_SIZE,
    "test_batch_size": BATCH_SIZE,
    "dataset_mixer": FUNCTION,
    **dict.fromkeys(("sampler", "train_sampler", "test_sampler"), _CALL),
    "splits": or_none(list_of(Sequence, "splits, one for each dataset, such as [[7, 2, 1]]")),
    "weights": or_none(list_of(Real, "numbers")),
}

_Builder = TypeVar("_Builder", bound=Callable[..., Any])
TrainLoaders = tuple[Loader, Optional[Loader], Optional[Loader]]


def build_nlp_train_loader(
    dataset: Any,
    train_batch_size: int,
    test_batch_size: int | None = None,
    sampler: Any = _ENDLESS,
    num_workers: int = 4,
    consumed_samples: int = 0,
    seed: int = 0,
    collate_fn: Collator | None = None,
    dataset_mixer: Mixer = ConcatDataset,
    mixup_func: Any = None,
    layouts: Overrides | None = None,
    readers: str = "every_rank",
    weights: Any = None,
    **loader_options: Any,
) -> TrainLoaders:
    """Build the loader of an endless training stream.

    Args:
        dataset: a dataset, such as a list of samples, its config (`LazyCall`), or a list of datasets or configs.
        train_batch_size: samples of a batch for one data-parallel rank.
        test_batch_size: unused; trainers set it on every training loader.
        sampler: config of the sampler; dataset, batch size, rank and seed are filled in.
        num_workers: processes that read; with 0, the trainer's process reads.
        consumed_samples: samples that all ranks together have used so far.
        seed: decides the order and the draws of random transforms.
        collate_fn: makes a batch of a list of samples; by default they are stacked.
        dataset_mixer: makes one dataset from several.
        mixup_func: `Mixup` or another `BatchTransform`, applied by the reader; or a function of images and labels that
            returns both, applied to each rank's rows by the trainer; or a config of one of these.
        layouts: field name -> {"sbp_list": [...], "placement_idx": int}, instead of the dataset's layouts.
        readers: who reads: "every_rank" (every rank its own shard), "node" or "rank0"; see `ReadPlan`.
        weights: a number for each sample, by which the sampler draws; `sampler` may set `num_samples` and
            `replacement` of `CyclicSampler`.
        **loader_options: further arguments of `DataLoader`, such as `prefetch` or `on_error`.

    Returns:
        The training loader, and None twice (no validation, no test loader).

    Raises:
        ConfigError: An argument is out of range, or the dataset empty.
    """
    check(_RULES, train_batch_size=train_batch_size, dataset_mixer=dataset_mixer, sampler=sampler)
    arguments = {"micro_batch_size": train_batch_size, "seed": seed, "consumed_samples": consumed_samples}
    if weights is not None:
        arguments["weights"] = instantiate_data(weights)
    loader = build_loader(
        lambda: _one_dataset(dataset, dataset_mixer),
        sampler,
        readers,
        arguments,
        num_workers=num_workers,
        collate_fn=instantiate(collate_fn),
        layouts=layouts,
        mixup_func=instantiate(mixup_func),
        **loader_options,
    )
    return loader, None, None


def build_nlp_test_loader(
    dataset: Any,
    test_batch_size: int,
    sampler: Any = _ONE_ROUND,
    num_workers: int = 4,
    seed: int = 0,
    collate_fn: Collator | None = None,
    dataset_mixer: Mixer = ConcatDataset,
    layouts: Overrides | None = None,
    readers: str = "every_rank",
    **loader_options: Any,
) -> Loader:
    """Build a loader of one round over a dataset; the arguments are those of `build_nlp_train_loader`.

    Returns:
        The loader. Its last batch is padded; `batch_info(batch).valid` is the number of rows that count.
    """
    check(_RULES, **locals())
    return build_loader(
        lambda: _one_dataset(dataset, dataset_mixer),
        sampler,
        readers,
        {"micro_batch_size": test_batch_size, "seed": seed},
        num_workers=num_workers,
        collate_fn=instantiate(collate_fn),
        layouts=layouts,
        **loader_options,
    )


def _under_name(name: str, function: _Builder, **defaults: Any) -> _Builder:
    """Copy a function under another name, which errors and saved configs show, and maybe with other defaults."""
    parameters = inspect.signature(function).parameters.values()
    kept = [defaults.get(each.name, each.default) for each in parameters if each.default is not each.empty]
    other: Any = FunctionType(function.__code__, globals(), name, tuple(kept))
    other.__qualname__, other.__doc__, other.__annotations__ = name, function.__doc__, function.__annotations__
    return other


build_image_train_loader = _under_name("build_image_train_loader", build_nlp_train_loader)
build_image_test_loader = _under_name("build_image_test_loader", build_nlp_test_loader, sampler=_ONE_SHUFFLED_ROUND)
"""`build_nlp_test_loader`, but shuffled by default, as LiBai's is."""


def build_nlp_train_val_test_loader(
    dataset: Any,
    splits: Sequence[Sequence[float]],
    weights: Sequence[float] | None,
    train_val_test_num_samples: Sequence[int] | None,
    train_batch_size: int,
    test_batch_size: int,
    train_sampler: Any = _ENDLESS,
    test_sampler: Any = _ONE_ROUND,
    num_workers: int = 4,
    consumed_samples: int = 0,
    seed: int = 0,
    collate_fn: Collator | None = None,
    dataset_mixer: Mixer = ConcatDataset,
    layouts: Overrides | None = None,
    readers: str = "every_rank",
    max_epochs: Sequence[float | None] | None = None,
    **loader_options: Any,
) -> TrainLoaders:
    """Build training, validation and test loaders over three parts of each dataset.

    Args:
        dataset: a dataset, its config, or a list of these.
        splits: for each dataset the proportions of the three parts, such as [[7, 2, 1]]. A corpus is divided between
            documents. `num_epochs` repeats them within each part; `max_num_samples` is divided by the proportions.
        weights: the weight of each dataset in the training stream, which is then a `BlendedDataset`. With None, an
            epoch has each sample once. Validation and test always have each sample once.
        train_val_test_num_samples: LiBai's hint to datasets that draw samples in advance; not needed here.
        train_batch_size: samples of a training batch for one data-parallel rank.
        test_batch_size: samples of a validation or test batch for one data-parallel rank.
        train_sampler: config of the training sampler.
        test_sampler: config of the validation and test sampler.
        num_workers, consumed_samples, seed, collate_fn, dataset_mixer, layouts, **loader_options: as in
            `build_nlp_train_loader`.
        max_epochs: with weights, how often the training stream uses each dataset at most, None for any number of
            times; see `BlendedDataset`.

    Returns:
        Training, validation and test loader; None for validation or test if all of its proportions are 0.

    Raises:
        ConfigError: Numbers of datasets, splits and weights differ, a split is malformed or leaves a part without a
            sample, weights are malformed, or there are weights beside a `dataset_mixer`.
    """
    check(_RULES, **locals())
    splits = splits or []
    proportions = [_proportions(split) for split in splits]
    if weights is not None and dataset_mixer is not ConcatDataset and len(weights) > 1:
        raise ConfigError(f"weights are {list(weights)}, and there is also a dataset_mixer; remove one of the two")
    if max_epochs is not None and weights is None:
        raise ConfigError(f"max_epochs is {list(max_epochs)}, but there are no weights of a blend; give weights, too")

    def no_sample(stage: int) -> ConfigError:
        shown = [list(split) for split in splits]
        return ConfigError(f"splits are {shown}, which leave no sample for {_PARTS[stage]}")

    @lru_cache(maxsize=1)
    def parts() -> list[list[Any]]:
        datasets = _datasets(dataset)
        _check_lengths(len(datasets), splits=splits, weights=weights, max_epochs=max_epochs)
        return [cut(each, split) for each, split in zip(datasets, splits)]

    def loader_of(stage: int, sampler: Any, **arguments: Any) -> Loader | None:
        if not any(split[stage] for split in proportions):
            return None

        def open_part() -> Any:
            kept = [number for number, part in enumerate(parts()) if len(part[stage])]
            if not kept:
                raise no_sample(stage)
            datasets = [parts()[number][stage] for number in kept]
            if weights is not None and stage == 0 and (len(kept) > 1 or max_epochs is not None):
                limits = None if max_epochs is None else [max_epochs[number] for number in kept]
                return BlendedDataset(datasets, [weights[number] for number in kept], max_epochs=limits)
            return _mixed(datasets, dataset_mixer)

        return build_loader(
            open_part,
            sampler,
            readers,
            {"seed": seed, **arguments},
            num_workers=num_workers,
            collate_fn=instantiate(collate_fn),
            layouts=layouts,
            **loader_options,
        )

    train = loader_of(0, train_sampler, micro_batch_size=train_batch_size, consumed_samples=consumed_samples)
    if train is None:
        raise no_sample(0)
    return (
        train,
        loader_of(1, test_sampler, micro_batch_size=test_batch_size),
        loader_of(2, test_sampler, micro_batch_size=test_batch_size),
    )


_LOADER_OPTIONS = [
    option for option in inspect.signature(BatchLoader).parameters.values() if option.kind is option.KEYWORD_ONLY
]


def _show_options(*builders: Any) -> None:
    """Replace `**loader_options` in signatures by the options of the loader; configs are checked by signatures."""
    for builder in builders:
        signature = inspect.signature(builder)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        options = [each for each in _LOADER_OPTIONS if each.name not in signature.parameters]
        builder.__signature__ = signature.replace(parameters=[*own, *options])


_show_options(build_nlp_train_loader, build_nlp_test_loader, build_nlp_train_val_test_loader)
_show_options(build_image_train_loader, build_image_test_loader)


def cut(dataset: Any, split: Sequence[float]) -> list[Any]:
    """Cut a dataset into three contiguous parts.

    Args:
        dataset: the dataset to cut. If its samples are made of documents, it is cut between documents.
        split: three proportions of any sum, none negative; missing ones are 0.

    Returns:
        Three parts that cover the dataset, each within one sample, or the nearest document, of its proportion.

    Raises:
        ConfigError: The split is malformed, or the dataset contains another dataset that repeats documents.
    """
    proportions = _proportions(split)
    by_documents = split_documents(dataset, proportions)
    if by_documents:
        return [Subset(dataset, 0, 0) if part is None else part for part in by_documents]
    edges = [round(length_of(dataset) * total / sum(proportions)) for total in (0.0, *accumulate(proportions))]
    return [Subset(dataset, start, stop) for start, stop in zip(edges[:-1], edges[1:])]


def _proportions(split: Sequence[float]) -> list[float]:
    try:
        proportions = [float(part) for part in split] + [0.0] * (3 - len(split))
    except (TypeError, ValueError):
        proportions = []
    if len(proportions) != 3 or not min(proportions) >= 0 or not 0 < sum(proportions) < inf:
        raise ConfigError(f"a split is {split!r}; give up to three proportions, such as [7, 2, 1]")
    return proportions


def build_loader(
    open_dataset: Callable[[], Any], sampler: Any, readers: str, arguments: dict[str, Any], **options: Any
) -> Loader:
    """Build dataset, sampler and loader, each on the ranks that need it.

    Only the ranks that read open the dataset. The sampler gets `arguments`, in addition to dataset and rank.
    """
    refuse_unknown("a loader", options, BatchLoader, given=("self", "dataset", "batch_sampler"))

    def make_stream(dataset: Any, shards: tuple[int, ...]) -> Any:
        rank, size = shards[0], get_data_parallel_size()
        filled_in = dict(arguments, dataset=dataset, data_parallel_rank=rank, data_parallel_size=size)
        stream = _instantiated(sampler, filled_in)
        if plan.readers != "every_rank" and not isinstance(stream, StreamSampler):
            raise ConfigError(
                f"readers={readers} needs a sampler that knows every rank's part, as CyclicSampler and "
                f"SingleRoundSampler do; {type(stream).__name__} does not"
            )
        return stream if shards == (rank,) else stream.serving(shards)

    def make_loader(dataset: Any, stream: Any) -> BatchLoader:
        return BatchLoader(dataset, stream, seed=arguments["seed"], **options)

    plan = ReadPlan(get_mesh(), readers)
    compared = {"batch size" if name == "micro_batch_size" else name: value for name, value in arguments.items()}
    compared.update(sampler=sampler, **options)
    mesh = plan.mesh
    if mesh.tensor_parallel_size > 1 and plan.readers == "every_rank":
        # Only with "every_rank": a rank that reads for a whole node needs whole samples.
        options["tensor_part"] = TensorPart(mesh.tensor_parallel_rank, mesh.tensor_parallel_size)
    return loader_for(plan, open_dataset, make_stream, make_loader, options.get("mixup_func"), compared)


def _instantiated(sampler: Any, arguments: dict[str, Any]) -> Any:
    try:
        return instantiate(deepcopy(sampler), **arguments)
    except DataPipelineError as error:
        # A default sampler has no config key to name. The caller names the key of the loader.
        if not error.config_path and isinstance(error.__cause__, DataPipelineError):
            raise error.__cause__ from None
        raise


def _datasets(dataset: Any) -> list[Any]:
    built = instantiate_data(dataset)
    if not isinstance(built, (list, tuple, ListConfig)):
        return [built]
    return [built] if built and _is_sample(built[0]) else list(built)


def _is_sample(item: Any) -> bool:
    """Whether an item of a list is a sample, and the list a dataset; otherwise it is one of several datasets."""
    if isinstance(item, (list, ListConfig)):  # A list of samples with fields is a dataset.
        return len(item) > 0 and not _has_fields(item[0])
    return _has_fields(item) or isinstance(item, (str, bytes, Real, np.generic, np.ndarray)) or hasattr(item, "detach")


def _has_fields(item: Any) -> bool:
    if is_dataclass(item):
        return not has_attribute(item, "__getitem__")
    return isinstance(item, tuple) or fields_in(item) is not None


def _one_dataset(dataset: Any, mixer: Mixer) -> Any:
    return _mixed(_datasets(dataset), mixer)


def _mixed(datasets: list[Any], mixer: Mixer) -> Any:
    if not datasets:
        raise ConfigError("dataset is an empty list; name at least one dataset")
    for each in datasets:
        if not has_attribute(each, "__getitem__") or isinstance(each, (Mapping, str, bytes)):
            raise ConfigError(f"dataset is {each!r}; it must be a dataset, a LazyCall of one, or a list of these")
    return datasets[0] if len(datasets) == 1 else mixer(datasets)


def _check_lengths(datasets: int, **given: Sequence[Any] | None) -> None:
    for name, values in given.items():
        if values is not None and len(values) != datasets:
            raise ConfigError(f"{name} has {len(values)} entries for {datasets} datasets; give one for each")
