"""The steps that a config describes: their global batch sizes, how each is split into batches, which are skipped."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from libai_data.config import try_get_key
from libai_data.data.attributes import attribute_of
from libai_data.data.nesting import taken_apart
from libai_data.data.samplers.schedule import Ranges, StepSchedule, parse_sizes, parse_skips
from libai_data.delivery import check_forward_fields
from libai_data.errors import ConfigError
from libai_data.loader.resumable import OfOneProcess
from libai_data.mesh.current import get_data_parallel_size

logger = logging.getLogger(__name__)

SCHEDULE_KEY = "train.batch_size_schedule"
SKIP_KEY = "train.skip_steps"


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of a step, complete and consistent."""

    micro_batch_size: int  # samples of one batch on one data-parallel rank (`train.train_micro_batch_size`)
    num_accumulation_steps: int
    global_batch_size: int  # samples of a step over all ranks; the product of these two and the data-parallel size


@dataclass(frozen=True)
class StepPlan:
    """The steps of a training."""

    schedule: StepSchedule  # global batch size of each step
    sizes: dict[int, BatchSizes]  # global batch size -> how a step of this size is split into batches
    skip_steps: Ranges = ()  # (first step, last step), both included, whose samples are left out

    @property
    def first(self) -> BatchSizes:
        """The sizes of the first step."""
        return self.sizes[self.schedule.sizes[0][1]]

    @property
    def is_plain(self) -> bool:
        """Whether all steps are equal, and none is skipped."""
        return len(self.schedule.sizes) == 1 and not self.skip_steps

    def micro_batches_of(self, step: int) -> int:
        """Batches in a step."""
        return self.sizes[self.schedule.size_of(step)].num_accumulation_steps

    def check_rows_of(self, loader: Any) -> None:
        """Raise ConfigError if the batches of a loader of this package have another size than those of the config."""
        ranks = get_data_parallel_size()
        size, rows = loader.global_batch_size if isinstance(loader, OfOneProcess) else None, self.first.micro_batch_size
        if size not in (None, rows * ranks):
            raise ConfigError(
                f"the train loader's batches have {size} rows, but with train.train_micro_batch_size {rows} and "
                f"{ranks} data-parallel rank(s), they should have {rows * ranks}: epochs, steps and logged numbers "
                f"would be wrong. Set train.train_micro_batch_size={size // ranks}, or change the loader"
            )

    def check_inputs(self, forward: Any, loader: Any, inputs: Mapping[str, Any]) -> None:
        """Check the model's first inputs; warn if a loader of any kind has batches of another size than the config."""
        check_forward_fields(forward, inputs)
        leaves: dict[str, Any] = {}
        taken_apart(inputs, leaves)
        dims = {size for leaf in leaves.values() for size in getattr(leaf, "shape", ())}
        known = loader.global_batch_size if isinstance(loader, OfOneProcess) else None
        rows = self.first.micro_batch_size * get_data_parallel_size()
        # Graphs may join the micro-batches of a step.
        if self.is_plain and dims and not {rows, rows * self.first.num_accumulation_steps} & (dims | {known}):
            logger.warning(
                f"The first batch of the train loader ({type(getattr(loader, 'counted', loader)).__name__}) does not "
                f"have the {rows} rows of the config, but inputs of the shapes "
                f"{sorted({tuple(leaf.shape) for leaf in leaves.values() if hasattr(leaf, 'shape')})}. So "
                "consumed_samples and samples_per_second are wrong. Set train.train_micro_batch_size to the rows of a "
                "batch on each data-parallel rank."
            )

    def followed_by(self, loader: Any) -> bool:
        """Let a train loader follow the plan. If it cannot: False, or a ConfigError if the plan is not plain."""
        stream = attribute_of(loader, "stream")
        rows = self.first.micro_batch_size * get_data_parallel_size()
        problem = ""
        if not callable(attribute_of(stream, "follow")) or not callable(attribute_of(loader, "follow")):
            name = type(loader).__name__
            problem = f"the train loader ({name}) does not use CyclicSampler, as DataLoader with ends='cycle' does"
        elif attribute_of(loader, "global_batch_size") != rows:
            problem = f"the train loader's batches have {loader.global_batch_size} rows, but the config has {rows}"
        if not problem:
            counts = {size: sizes.num_accumulation_steps for size, sizes in self.sizes.items()}
            loader.follow(self.schedule, self.skip_steps, counts)
        elif not self.is_plain:
            raise ConfigError(f"{SCHEDULE_KEY} and {SKIP_KEY} need a loader that can follow them, but {problem}")
        return not problem


def step_plan(cfg: Any, data_parallel_size: int | None = None) -> StepPlan:
    """Read the plan from a config, in which batch sizes may be missing; a ConfigError if they contradict each other.

    If the config sets the micro-batch size or the accumulation steps, all steps use it, and the other one is computed.
    """
    ranks = get_data_parallel_size() if data_parallel_size is None else data_parallel_size
    micro, accumulation = (
        try_get_key(cfg, f"train.{key}") for key in ("train_micro_batch_size", "num_accumulation_steps")
    )
    skips = parse_skips(SKIP_KEY, try_get_key(cfg, SKIP_KEY))
    entries = parse_sizes(SCHEDULE_KEY, ramp) if (ramp := try_get_key(cfg, SCHEDULE_KEY)) else ()
    total = try_get_key(cfg, "train.global_batch_size")
    if not entries:
        sizes = complete_batch_sizes(micro, total, accumulation, ranks)
        return StepPlan(StepSchedule(((0, sizes.global_batch_size),)), {sizes.global_batch_size: sizes}, skips)
    if total is not None and total != entries[-1][1]:
        raise ConfigError(
            f"train.global_batch_size is {total}, but {SCHEDULE_KEY} ends with {entries[-1][1]}; leave it None, or set "
            "it to the same size"
        )
    if len(entries) > 1 and try_get_key(cfg, "graph.enabled", default=False):
        raise ConfigError(
            f"{SCHEDULE_KEY} has several sizes, but a graph is compiled for one; set graph.enabled=False, or stop and "
            "resume where the size changes"
        )
    try:
        cut = {size: complete_batch_sizes(micro, size, accumulation, ranks) for _, size in entries}
    except ConfigError as error:
        raise ConfigError(f"{SCHEDULE_KEY} is {[list(entry) for entry in entries]}: {error}") from error
    return StepPlan(StepSchedule(entries), cut, skips)


def complete_batch_sizes(
    micro_batch_size: int | None,
    global_batch_size: int | None,
    num_accumulation_steps: int | None,
    data_parallel_size: int,
) -> BatchSizes:
    """Compute the missing sizes: global = micro x accumulation x data-parallel size; or a ConfigError."""
    for key, value in (
        ("train_micro_batch_size", micro_batch_size),
        ("global_batch_size", global_batch_size),
        ("num_accumulation_steps", num_accumulation_steps),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"train.{key} is {value!r}; it must be a whole number of at least 1, or None")
    steps = num_accumulation_steps or 1
    if global_batch_size is None:
        if micro_batch_size is None:
            raise ConfigError(
                "neither train.train_micro_batch_size nor train.global_batch_size is set; set one of them"
            )
        global_batch_size = micro_batch_size * steps * data_parallel_size
    elif micro_batch_size is None:
        micro_batch_size = _divide(global_batch_size, "num_accumulation_steps", steps, data_parallel_size)
    elif num_accumulation_steps is None:
        steps = _divide(global_batch_size, "train_micro_batch_size", micro_batch_size, data_parallel_size)
    product = micro_batch_size * steps * data_parallel_size
    if global_batch_size != product:
        raise ConfigError(
            f"train.global_batch_size is {global_batch_size}, but train_micro_batch_size x num_accumulation_steps x "
            f"data_parallel_size is {micro_batch_size} x {num_accumulation_steps} x {data_parallel_size} = {product}; "
            "leave one of them None to have it computed"
        )
    return BatchSizes(micro_batch_size, steps, global_batch_size)


def _divide(global_batch_size: int, name: str, size: int, data_parallel_size: int) -> int:
    quotient, rest = divmod(global_batch_size, size * data_parallel_size)
    if rest:
        raise ConfigError(
            f"train.global_batch_size is {global_batch_size}, which is not a multiple of {name} x data_parallel_size = "
            f"{size} x {data_parallel_size} = {size * data_parallel_size}; change one of them"
        )
    return quotient
