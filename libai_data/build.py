"""From a config to loaders: LiBai's builders, one implementation behind their five names."""

from __future__ import annotations

import inspect
from copy import deepcopy
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from omegaconf import ListConfig

from libai_data.config import LazyCall, instantiate
from libai_data.datasets.combine import ConcatDataset, Subset
from libai_data.errors import ConfigError, DataPipelineError, nearest
from libai_data.loader.collate import Collator
from libai_data.loader.dataloader import DataLoader
from libai_data.loader.schema import Overrides
from libai_data.mesh import get_data_parallel_rank, get_data_parallel_size
from libai_data.samplers import CyclicSampler, SingleRoundSampler
from libai_data.samplers.sampler import check_at_least

Mixer = Callable[[List[Any]], Any]
_ENDLESS = LazyCall(CyclicSampler)(shuffle=True)
_ONE_ROUND = LazyCall(SingleRoundSampler)(shuffle=False, drop_last=False)
_ONE_SHUFFLED_ROUND = LazyCall(SingleRoundSampler)(shuffle=True, drop_last=False)

TrainLoaders = Tuple[DataLoader, Optional[DataLoader], Optional[DataLoader]]


def build_nlp_train_loader(
    dataset: Any,
    train_batch_size: int,
    test_batch_size: Optional[int] = None,
    sampler: Any = _ENDLESS,
    num_workers: int = 4,
    consumed_samples: int = 0,
    seed: int = 0,
    collate_fn: Optional[Collator] = None,
    dataset_mixer: Mixer = ConcatDataset,
    mixup_func: Any = None,
    layouts: Optional[Overrides] = None,
    **loader_options: Any,
) -> TrainLoaders:
    """Build the loader of an endless training stream.

    Args:
        dataset: a dataset, its config (`LazyCall`), or a list of these.
        train_batch_size: samples of a batch for one data-parallel rank.
        test_batch_size: unused; trainers set it on every training loader.
        sampler: config of the sampler; dataset, batch size, rank and seed are filled in.
        num_workers: processes that read; 0 reads in the trainer's own.
        consumed_samples: samples that all ranks together have taken so far.
        seed: decides the order and what random transforms draw.
        collate_fn: makes a batch of a list of samples; by default they are stacked.
        dataset_mixer: makes one dataset of several.
        mixup_func: applied to each batch by the trainer, or its config.
        layouts: field name -> {"sbp_list": [...], "placement_idx": int}, instead of what the dataset says.
        **loader_options: further arguments of `DataLoader`, such as `prefetch` or `on_error`.

    Returns:
        The training loader, and None twice (no validation, no test loader).

    Raises:
        ConfigError: An argument is out of range, or the dataset smaller than a global batch.
    """
    check_at_least(1, train_batch_size=train_batch_size)
    loader = _build_loader(
        _one_dataset(dataset, dataset_mixer),
        sampler,
        {"micro_batch_size": train_batch_size, "seed": seed, "consumed_samples": consumed_samples},
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
    collate_fn: Optional[Collator] = None,
    dataset_mixer: Mixer = ConcatDataset,
    layouts: Optional[Overrides] = None,
    **loader_options: Any,
) -> DataLoader:
    """Build a loader of one round over a dataset; the arguments are those of `build_nlp_train_loader`.

    Returns:
        The loader. Its last batch is filled up; `batch_info(batch).valid` tells how many rows count.
    """
    check_at_least(1, test_batch_size=test_batch_size)
    return _build_loader(
        _one_dataset(dataset, dataset_mixer),
        sampler,
        {"micro_batch_size": test_batch_size, "seed": seed},
        num_workers=num_workers,
        collate_fn=instantiate(collate_fn),
        layouts=layouts,
        **loader_options,
    )


build_image_train_loader = build_nlp_train_loader


def build_image_test_loader(
    dataset: Any,
    test_batch_size: int,
    sampler: Any = _ONE_SHUFFLED_ROUND,
    num_workers: int = 4,
    seed: int = 0,
    collate_fn: Optional[Collator] = None,
    dataset_mixer: Mixer = ConcatDataset,
    layouts: Optional[Overrides] = None,
    **loader_options: Any,
) -> DataLoader:
    """`build_nlp_test_loader`, but shuffled by default, as LiBai's is."""
    return build_nlp_test_loader(
        dataset, test_batch_size, sampler, num_workers, seed, collate_fn, dataset_mixer, layouts, **loader_options
    )


def build_nlp_train_val_test_loader(
    dataset: Any,
    splits: Sequence[Sequence[float]],
    weights: Optional[Sequence[float]],
    train_val_test_num_samples: Optional[Sequence[int]],
    train_batch_size: int,
    test_batch_size: int,
    train_sampler: Any = _ENDLESS,
    test_sampler: Any = _ONE_ROUND,
    num_workers: int = 4,
    consumed_samples: int = 0,
    seed: int = 0,
    collate_fn: Optional[Collator] = None,
    dataset_mixer: Mixer = ConcatDataset,
    layouts: Optional[Overrides] = None,
    **loader_options: Any,
) -> TrainLoaders:
    """Build training, validation and test loaders over three parts of each dataset.

    Args:
        dataset: a dataset, its config, or a list of these.
        splits: for each dataset the proportions of the three parts, such as [[7, 2, 1]].
        weights: for each dataset its weight; they must be equal (datasets are put one behind the other).
        train_val_test_num_samples: LiBai's hint to datasets that draw samples in advance; not needed here.
        train_batch_size: samples of a training batch for one data-parallel rank.
        test_batch_size: samples of a validation or test batch for one data-parallel rank.
        train_sampler: config of the training sampler.
        test_sampler: config of the validation and test sampler.
        num_workers, consumed_samples, seed, collate_fn, dataset_mixer, layouts, **loader_options: as in
            `build_nlp_train_loader`.

    Returns:
        Training, validation and test loader; None for a part that is empty.

    Raises:
        ConfigError: Numbers of datasets, splits and weights differ, a split is malformed, or weights are unequal.
    """
    datasets = _datasets(dataset)
    check_at_least(1, train_batch_size=train_batch_size, test_batch_size=test_batch_size)
    _check_lengths(len(datasets), splits=splits, weights=weights)
    if weights is not None and len(set(weights)) > 1:
        raise ConfigError(
            f"weights are {list(weights)}, but datasets are put one behind the other; set equal weights, or a "
            "dataset_mixer that blends"
        )
    parts = [cut(each, split) for each, split in zip(datasets, splits)]
    train, validation, test = ([part[stage] for part in parts if len(part[stage])] for stage in range(3))
    if not train:
        raise ConfigError(f"splits are {[list(split) for split in splits]}, which leave no sample for training")
    shared = dict(
        num_workers=num_workers,
        seed=seed,
        collate_fn=collate_fn,
        dataset_mixer=dataset_mixer,
        layouts=layouts,
        **loader_options,
    )
    loader, _, _ = build_nlp_train_loader(
        train, train_batch_size, sampler=train_sampler, consumed_samples=consumed_samples, **shared
    )
    others = [
        build_nlp_test_loader(part, test_batch_size, sampler=test_sampler, **shared) if part else None
        for part in (validation, test)
    ]
    return loader, others[0], others[1]


def cut(dataset: Any, split: Sequence[float]) -> List[Subset]:
    """Cut a dataset into three contiguous parts.

    Args:
        dataset: the whole.
        split: three proportions of any sum, none negative; missing ones are 0.

    Returns:
        Three parts that cover the dataset, each within one sample of its proportion.

    Raises:
        ConfigError: The split is malformed.
    """
    proportions = [float(part) for part in split] + [0.0] * (3 - len(split))
    if len(proportions) != 3 or min(proportions) < 0 or sum(proportions) <= 0:
        raise ConfigError(f"a split is {list(split)}; it takes up to three proportions, such as [7, 2, 1]")
    edges, total = [0], 0.0
    for part in proportions:
        total += part
        edges.append(round(len(dataset) * total / sum(proportions)))
    return [Subset(dataset, start, stop) for start, stop in zip(edges[:-1], edges[1:])]


def _build_loader(dataset: Any, sampler: Any, arguments: Dict[str, Any], **options: Any) -> DataLoader:
    """Build sampler and loader.

    Args:
        dataset: the dataset itself.
        sampler: config of the sampler.
        arguments: what to fill into it beside dataset and rank.
        **options: arguments of `DataLoader`.
    """
    known = [
        name for name, option in inspect.signature(DataLoader).parameters.items() if option.kind is option.KEYWORD_ONLY
    ]
    for name in options:
        if name not in known:
            raise ConfigError(f"a loader takes no '{name}'; it takes {known}.{nearest(name, known)}")
    filled_in = dict(
        arguments,
        dataset=dataset,
        data_parallel_rank=get_data_parallel_rank(),
        data_parallel_size=get_data_parallel_size(),
    )
    try:
        batch_sampler = instantiate(deepcopy(sampler), **filled_in)
    except DataPipelineError as error:
        # Of a default sampler there is no key to name; whoever makes this call names the key of the loader.
        if not error.config_path and isinstance(error.__cause__, DataPipelineError):
            raise error.__cause__ from None
        raise
    return DataLoader(dataset, batch_sampler, seed=arguments["seed"], **options)


def _datasets(dataset: Any) -> List[Any]:
    built = instantiate(dataset)
    return list(built) if isinstance(built, (list, tuple, ListConfig)) else [built]


def _one_dataset(dataset: Any, mixer: Mixer) -> Any:
    datasets = _datasets(dataset)
    if not datasets:
        raise ConfigError("dataloader.*.dataset is an empty list; name at least one dataset")
    return datasets[0] if len(datasets) == 1 else mixer(datasets)


def _check_lengths(datasets: int, **settings: Optional[Sequence[Any]]) -> None:
    for name, values in settings.items():
        if values is not None and len(values) != datasets:
            raise ConfigError(f"{name} has {len(values)} entries for {datasets} datasets; give one for each")
