"""Build train and test loaders from the `dataloader` section of a config."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from omegaconf import OmegaConf

from libai_data.config import instantiate, try_get_key
from libai_data.config.keys import path_of
from libai_data.config.naming import describe
from libai_data.config.signatures import parameters_of, target_of
from libai_data.config.values import fill_in, given, require
from libai_data.data.attributes import attribute_of, has_attribute
from libai_data.data.datasets.blend_table import log_blend
from libai_data.data.samplers.batch_runs import named_runs, runs_of_sampler
from libai_data.data.samplers.schedule import StepSchedule
from libai_data.engine.data_state import schedule_of, stream_state_of
from libai_data.engine.models import required_section
from libai_data.engine.setup import set_key
from libai_data.engine.step_plan import step_plan
from libai_data.errors import ConfigError
from libai_data.iterables.combined import CombinedLoader
from libai_data.iterables.iterable_loader import indexed_dataset_of
from libai_data.iterables.kinds import is_loader, is_own_loader, without_bar

logger = logging.getLogger(__name__)

# The number of evaluation batches that means "all" in LiBai.
_ALL = 10**9


def build_configured_train_loader(cfg: Any, tokenizer: Any = None) -> Any:
    """Fill batch sizes, seed and tokenizer into `cfg.dataloader.train`, and build what it describes.

    This is a tuple of (train, validation, test) loaders, or only a train loader.
    """
    section = required_section(cfg, "dataloader.train", "build_train_loader")
    rows, key = step_plan(cfg).first.micro_batch_size, "dataloader.train"
    _fill_in(cfg, key, "seed", cfg.train.seed)
    if _is_of_iterable(section):
        _require(cfg, key, "micro_batch_size", rows, "train.train_micro_batch_size")
        return instantiate(section, _recursive_=False)
    _require(cfg, key, "train_batch_size", rows, "train.train_micro_batch_size")
    _require(cfg, key, "test_batch_size", cfg.train.test_micro_batch_size, "train.test_micro_batch_size")
    consumed = try_get_key(cfg, "dataloader.consumed_samples", default=0)
    _require(cfg, key, "consumed_samples", consumed, "the checkpoint", default=0)
    if "train_val_test_num_samples" in section:
        require(cfg, f"{key}.train_val_test_num_samples", _num_samples(cfg), "train.train_iter and train.evaluation")
    for dataset in _datasets(section):
        if "seed" in dataset:
            _fill_in(cfg, path_of(dataset), "seed", cfg.train.seed)
        _set_tokenizer(cfg, dataset, tokenizer)
    return instantiate(section, _recursive_=False)


def build_configured_test_loaders(cfg: Any, tokenizer: Any = None) -> list[Any]:
    """Build the list of loaders that `cfg.dataloader.test` describes; an empty list without this section."""
    sections = try_get_key(cfg, "dataloader.test")
    if sections is None:
        return []
    if not OmegaConf.is_list(sections):
        raise ConfigError("dataloader.test must be a list of loaders; put it into brackets: dataloader.test = [...]")
    for number in range(len(sections)):
        key = f"dataloader.test.{number}"
        section = required_section(cfg, key, "build_test_loader")
        name = "micro_batch_size" if _is_of_iterable(section) else "test_batch_size"
        _require(cfg, key, name, cfg.train.test_micro_batch_size, "train.test_micro_batch_size")
        _fill_in(cfg, key, "seed", cfg.train.seed)
        for dataset in _datasets(section):
            _set_tokenizer(cfg, dataset, tokenizer)
    return [instantiate(section, _recursive_=False) for section in sections]


def scale_to_epochs(cfg: Any, data_loader: Any) -> None:
    """Convert the epochs and ratios of the config into steps, as LiBai's automatic scaling does.

    `train.train_iter` becomes the larger of itself and `train.train_epoch` epochs. Warm-up, milestones, and the periods
    of evaluations and checkpoints are computed from it.
    """
    train = cfg.train
    epochs = try_get_key(cfg, "train.train_epoch", default=0) or 0
    samples = _samples_per_epoch(data_loader)
    schedule = schedule_of(data_loader, train.global_batch_size)
    batches = _batches_per_epoch(data_loader)
    # If there are several batch sizes, the last one decides the periods.
    per_epoch = samples / schedule.sizes[-1][1]
    if batches:
        per_epoch = batches / step_plan(cfg).first.num_accumulation_steps
    if epochs:
        _require_epochs(per_epoch, "train.train_epoch", "train.train_iter")
        if batches:
            steps = math.ceil(per_epoch * epochs - 1e-6)
        else:
            steps = _steps_of(math.ceil(samples * epochs - 1e-6), data_loader, schedule)
        if steps > (given(cfg, "train.train_iter") or 0):
            fill_in(cfg, "train.train_iter", steps)
    if not train.train_iter or train.train_iter < 1:
        raise ConfigError(
            f"train.train_iter is {train.train_iter} and train.train_epoch {epochs}: there is nothing to train"
        )
    if try_get_key(cfg, "graph.enabled", default=False):
        _check_equal_batches(data_loader, train.train_iter * step_plan(cfg).first.num_accumulation_steps)
    _set_warmup(cfg)
    fill_in(cfg, "train.samples", schedule.position_of(train.train_iter))
    if try_get_key(cfg, "train.scheduler") is not None:
        _scale_schedule(cfg)
    _scale_period(cfg, "train.evaluation.eval_period", "train.evaluation.eval_after_n_epoch", per_epoch)
    _scale_period(cfg, "train.checkpointer.period", "train.checkpointer.save_model_after_n_epoch", per_epoch)
    logger.info("The training has %d steps, %d of them for warm-up.", train.train_iter, train.warmup_iter)
    log_blend(indexed_dataset_of(data_loader), train.samples, schedule.position_of)


def _steps_of(places: int, data_loader: Any, schedule: StepSchedule) -> int:
    """Number of steps until the stream has passed `places` places."""
    state = stream_state_of(data_loader)
    left_out = state.left_out.count_before(places) if state is not None else 0
    return schedule.step_at(places - left_out - 1) + 1


def _set_warmup(cfg: Any) -> None:
    steps, ratio = cfg.train.train_iter, try_get_key(cfg, "train.warmup_ratio", default=0) or 0
    # As for the epochs: 0.07 * 100 is a little more than 7 for floats.
    warmup, value = math.ceil(steps * ratio - 1e-6), given(cfg, "train.warmup_iter")
    if value is None:
        fill_in(cfg, "train.warmup_iter", warmup)
    elif value > steps or (ratio and value != warmup):
        raise ConfigError(
            f"train.warmup_iter is {value}, but train.warmup_ratio is {ratio} and train.train_iter {steps}: set one of "
            f"warmup_iter (at most {steps}) and warmup_ratio, and leave the other out"
        )


def _scale_schedule(cfg: Any) -> None:
    key = "train.scheduler"
    milestones = given(cfg, f"{key}.milestones") or try_get_key(cfg, "train.computed.shares")
    if milestones:
        if any(not 0 <= milestone < 1 for milestone in milestones):
            raise ConfigError(
                f"train.scheduler.milestones are {list(milestones)}; they are shares of all steps, 0 <= share < 1"
            )
        set_key(cfg, "train.computed.shares", list(milestones))
        fill_in(cfg, f"{key}.milestones", [int(milestone * cfg.train.train_iter + 1e-6) for milestone in milestones])
    if cfg.train.warmup_iter and not _accepts(cfg, key, "warmup_iter"):
        raise ConfigError(
            f"train.warmup_iter is {cfg.train.warmup_iter}, but {describe(cfg.train.scheduler._target_)} has no "
            "argument warmup_iter; set train.warmup_ratio=0 and train.warmup_iter=null, or choose a schedule with a "
            "warm-up, such as WarmupCosineLR"
        )
    _fill_in(cfg, key, "warmup_iter", cfg.train.warmup_iter)
    _fill_in(cfg, key, "max_iter", cfg.train.train_iter)


def _scale_period(cfg: Any, period_key: str, epochs_key: str, per_epoch: float) -> None:
    epochs = try_get_key(cfg, epochs_key)
    if not epochs:
        return
    _require_epochs(per_epoch, epochs_key, period_key)
    set_key(cfg, period_key, max(1, int(per_epoch * epochs + 1e-6)))  # 2.3 * 50 is less than 115 for floats
    logger.info("%s is %d steps, for every %g epoch(s).", period_key, try_get_key(cfg, period_key), epochs)


def _batches_per_epoch(data_loader: Any) -> int:
    """Batches of an epoch of a loader that ends, whose last batch may be smaller; 0 if it is endless or has no length.

    It is not known how many batches a loader has whose items are made of those of a stream.
    """
    state = stream_state_of(data_loader)
    if attribute_of(data_loader, "endless") or (state is not None and state.start is not None):
        return 0
    with suppress(TypeError):
        return len(data_loader)
    return 0


def _check_equal_batches(data_loader: Any, batches: int) -> None:
    """Refuse a loader if one of the first `batches` is known to have other rows: a graph is compiled for one shape."""
    loaders = data_loader.loaders if isinstance(data_loader, CombinedLoader) else {"": data_loader}
    for name, loader in ((name, without_bar(each)) for name, each in loaders.items()):
        runs = loader.batch_runs() if is_own_loader(loader) else runs_of_sampler(loader) if is_loader(loader) else []
        for number, which, rows in [*named_runs(runs)][1:2]:
            if number < batches:
                raise ConfigError(
                    f"on each data-parallel rank, {which} of an epoch has {rows} of {runs[0].rows} rows"
                    f"{name and f' of loader {name!r}'}, but a graph is compiled for batches of one size. Set "
                    "drop_last=True, ends='pad' or ends='cycle', or give a batch_sampler equal lists; or "
                    "graph.enabled=False"
                )


def _samples_per_epoch(data_loader: Any) -> int:
    state = stream_state_of(data_loader)
    if state is not None:
        # It is not known in advance how many samples a stream transform makes of an epoch.
        return state.order.epoch_size if state.start is None else 0
    dataset = indexed_dataset_of(data_loader)
    return len(dataset) if dataset is not None and has_attribute(dataset, "__len__") else 0


def _require_epochs(per_epoch: float, key: str, instead: str) -> None:
    if not per_epoch:
        raise ConfigError(
            f"{key} is set, but the train loader has no dataset whose length is known; set {instead} instead"
        )


def _num_samples(cfg: Any) -> list[int]:
    """Numbers of train, validation and test samples of the whole training, which some of LiBai's datasets need."""
    evaluation = cfg.train.evaluation
    period = evaluation.eval_period or cfg.train.train_iter + 1  # 0: only after the last step
    rounds = cfg.train.train_iter // period + 1 if evaluation.enabled else 0
    per_round = min(evaluation.eval_iter, _ALL) if evaluation.enabled else 1
    batch = cfg.train.test_micro_batch_size  # As `inference_on_dataset` counts.
    return [int(cfg.train.samples), int(max(rounds * per_round, 1) * batch), int(per_round * batch)]


def _fill_in(cfg: Any, key: str, name: str, value: Any) -> None:
    """If the target of a LazyCall has this parameter, and the config does not set it, set it."""
    if _accepts(cfg, key, name) and given(cfg, f"{key}.{name}") is None:
        fill_in(cfg, f"{key}.{name}", value)


def _require(cfg: Any, key: str, name: str, value: Any, source: str, default: Any = None) -> None:
    """If the target of a LazyCall has this parameter, set it; raise ConfigError if the config has another value."""
    if _accepts(cfg, key, name):
        require(cfg, f"{key}.{name}", value, source, default)


def _accepts(cfg: Any, key: str, name: str) -> bool:
    target = target_of(try_get_key(cfg, key), key)
    return target is None or parameters_of(target).accepts(name)


def _set_tokenizer(cfg: Any, dataset: Any, tokenizer: Any) -> None:
    """Set the config's tokenizer in a dataset and its inner datasets, if they have this parameter and no own value."""
    if tokenizer is not None:
        _fill_in(cfg, path_of(dataset), "tokenizer", tokenizer)
        for inner in _datasets(dataset):
            _set_tokenizer(cfg, inner, tokenizer)


def _is_of_iterable(section: Any) -> bool:
    """Whether a section calls `from_iterable`, or another builder with the parameter `micro_batch_size`."""
    target = target_of(section, "")
    return target is not None and "micro_batch_size" in parameters_of(target).names


def _datasets(section: Any) -> Iterator[Any]:
    """The configs of the datasets in the config of a loader or dataset."""
    for name in ("dataset", "datasets"):
        dataset = try_get_key(section, name)
        for each in dataset if OmegaConf.is_list(dataset) else [dataset]:
            if OmegaConf.is_dict(each):
                yield each
