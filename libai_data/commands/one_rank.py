"""A config on one process: its mesh, and loaders that yield the batches of all its ranks."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple

from libai_data.config import check_values, try_get_key
from libai_data.config.signatures import parameters_of, target_of
from libai_data.data.attributes import attribute_of, call_if_there
from libai_data.data.samplers.sampler import StreamSampler
from libai_data.engine.built_parts import as_three_loaders
from libai_data.engine.loaders import build_configured_test_loaders, build_configured_train_loader
from libai_data.engine.running_stages import stages_of
from libai_data.engine.setup import complete_train_config, set_key
from libai_data.engine.step_plan import BatchSizes, StepPlan, step_plan
from libai_data.errors import ConfigError
from libai_data.mesh.parallel_mesh import SIZE_KEYS, ParallelMesh

_STAGES = {"train": "fit", "valid": "validate", "test": "test"}
_KINDS = {"train": "train", "valid": "val", "test": "test"}
SPLITS = tuple(_KINDS)


class OneRank(NamedTuple):
    """Loaders of a split on one process; for training there is one loader."""

    loaders: list[Any]
    plan: StepPlan  # the steps of the training on the mesh, as the config describes them
    follows: bool = False  # whether the training loader follows `plan`, with a batch per data-parallel rank

    def close(self) -> None:
        for loader in self.loaders:
            call_if_there(loader, "close")


def one_rank_loaders(
    cfg: Any, data_parallel_size: int, split: str = "train", num_workers: int = 0, tokenizer: Any = None
) -> OneRank:
    """Build loaders that yield the batch of data-parallel rank 0, then the batch of rank 1, and so on.

    Args:
        cfg: the whole config; it is not changed.
        split: "train", "valid" or "test".
        num_workers: workers of each loader that has such an argument.
        tokenizer: for the datasets; None if the config has no tokenizer.
    """
    cfg = deepcopy(cfg)
    plan = step_plan(cfg, data_parallel_size)
    first = plan.first
    for key, value in (
        ("batch_size_schedule", None),
        ("global_batch_size", first.global_batch_size),
        ("train_micro_batch_size", first.micro_batch_size),
        ("num_accumulation_steps", first.num_accumulation_steps * data_parallel_size),
    ):
        set_key(cfg, f"train.{key}", value)
    complete_train_config(cfg)
    set_key(cfg, "train.samples", plan.schedule.position_of(cfg.train.train_iter or 0))
    sections = (try_get_key(cfg, "dataloader.train"), *(try_get_key(cfg, "dataloader.test") or ()))
    for section in sections:
        _set_argument(section, "num_workers", num_workers)
        _set_argument(section, "readers", "every_rank")
    loaders = _built(cfg, split, tokenizer)
    for loader in loaders:
        if isinstance(attribute_of(loader, "stream"), StreamSampler):
            loader.stream.take_turns(data_parallel_size)
    if split != "train":
        return OneRank(loaders, plan)
    cut = {
        size: BatchSizes(each.micro_batch_size, each.num_accumulation_steps * data_parallel_size, size)
        for size, each in plan.sizes.items()
    }
    return OneRank(loaders, plan, StepPlan(plan.schedule, cut, plan.skip_steps).followed_by(loaders[0]))


def _set_argument(section: Any, name: str, value: Any) -> None:
    target = target_of(section, "")
    if target is not None and parameters_of(target).accepts(name):
        section[name] = value


def _built(cfg: Any, split: str, tokenizer: Any | None) -> list[Any]:
    stages = stages_of(cfg)
    if stages is not None:
        stages.enter(_STAGES[split])
        return stages.loaders(_KINDS[split])
    if split == "test":
        return build_configured_test_loaders(cfg, tokenizer)
    train, valid, test = as_three_loaders(build_configured_train_loader(cfg, tokenizer))
    if split == "train":
        return [train]
    for unused in (train, test):
        call_if_there(unused, "close")
    return [] if valid is None else [valid]


def mesh_of(cfg: Any, ranks: int | None = None, nodes: int = 1) -> ParallelMesh:
    """The mesh of `train.dist`; by default with the fewest ranks that its sizes allow. Checks the config first."""
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks is {ranks}; it must be at least 1")
    check_values(cfg)
    dist = cfg.train.dist
    if ranks is None:
        ranks = 1
        for key in SIZE_KEYS:
            size = dist.get(key)
            # If a size is not a number, from_config raises an error that names it.
            ranks *= size if isinstance(size, int) and size > 0 else 1
    return ParallelMesh.from_config(dist, world_size=ranks, num_nodes=nodes, gpu_available=True)
