"""What a job does before it builds anything: logging, mesh, batch sizes, config."""

from __future__ import annotations

import logging
import os
import random
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from libai_data.config import LazyConfig, check_targets, check_values, try_get_key
from libai_data.config.overrides import has_overrides
from libai_data.config.values import check_device, check_lone_keys, fill_in, given, keys_switched_off, require
from libai_data.data.random.generator_states import generators_in_turn
from libai_data.data.samplers.resuming import RESTART_DATA, check_overrides
from libai_data.engine.agreement import check_same_start, mesh_warnings
from libai_data.engine.data_state import OVERRIDE_KEY
from libai_data.engine.logging_setup import setup_logger
from libai_data.engine.output_folder import CONFIG, FAST_DEV_RUN, save_config, take_output_folder, user_resumes
from libai_data.engine.step_plan import step_plan
from libai_data.errors import ConfigError
from libai_data.launch.job_environment import warn_of_mistyped_variables
from libai_data.mesh.current import (
    get_rank,
    get_tensor_parallel_size,
    get_world_size,
    is_main_process,
    setup_dist_util,
)
from libai_data.mesh.peers.liveness import watch_over_ranks

logger = logging.getLogger(__name__)


def default_setup(cfg: Any, args: Any = None) -> None:
    """Set up the job that a config describes: check it, set the mesh, complete the batch sizes, lock the output folder,
    start logging, save `config.yaml`.

    Args:
        cfg: the whole config; sizes of the mesh and of batches that it does not set are written into it.
        args: the command line: `resume`, `eval_only`, `fast_dev_run`, and `opts`, overrides (`key=value`) that are
            applied if `LazyConfig.apply_overrides` was not called for this config. `cfg.train.resume` then says whether
            the run continues from a checkpoint in its output folder.

    Raises:
        ConfigError: Unknown keys, sizes that contradict each other, ranks with other versions or another config, or an
            output folder that another running training uses.
        MeshError: Sizes that do not fit the ranks.
    """
    overrides = getattr(args, "opts", None)
    if overrides and not has_overrides(cfg):
        LazyConfig.apply_overrides(cfg, list(overrides))
    # Log only to the console until this run has locked the output folder.
    setup_logger(rank=get_rank())
    check_values(cfg)
    users = try_get_key(cfg, "train.resume") if args is None else given(cfg, "train.resume")
    fill_in(cfg, "train.resume", bool(users or user_resumes(args)))
    is_trial = bool(getattr(args, "fast_dev_run", False))
    if is_trial and cfg.train.resume:
        raise ConfigError("--fast-dev-run starts at step 0; give it without --resume")
    if is_trial:
        set_key(cfg, "train.output_dir", os.path.join(str(cfg.train.output_dir), FAST_DEV_RUN))
    check_targets(cfg)
    output_dir = os.path.abspath(cfg.train.output_dir)
    mesh = setup_dist_util(cfg.train.dist)
    watch_over_ranks()
    check_same_start(cfg)
    check_device(cfg, mesh.device_type)
    complete_train_config(cfg)
    if mesh.device_type == "cpu":
        cfg.train.input_placement_device = "cpu"

    writes = not getattr(args, "eval_only", False)
    moved_to = ""
    if writes:
        taken = take_output_folder(output_dir, cfg.train.resume, str(cfg.train.load_weight or ""), is_trial)
        moved_to = taken.moved_to
        fill_in(cfg, "train.resume", taken.resume)
    setup_logger(output_dir, get_rank(), "log.txt" if writes else "log_eval.txt")
    if moved_to:
        logger.warning(
            "%s contained an earlier run. It is now in %s; --resume would have continued it.", output_dir, moved_to
        )
    nodes, device = mesh.num_nodes, mesh.device_type
    logger.info("Mesh: %s, %d rank(s) on %d node(s), %s.", mesh.sizes_in_words, mesh.world_size, nodes, device)
    if mesh.world_size > 1:
        logger.info("All ranks have the same versions and config.")
    for warning in (*mesh_warnings(mesh), *keys_switched_off(cfg)):
        logger.warning(warning)
    warn_of_mistyped_variables()
    if args is not None:
        logger.info("Command line: %s", args)
    plan = step_plan(cfg)
    for step, size in plan.schedule.sizes:
        sizes = plan.sizes[size]
        since = f"From step {step} on, a" if len(plan.schedule.sizes) > 1 else "A"
        logger.info(
            f"{since} step uses {size} sample(s): {sizes.micro_batch_size} on each data-parallel rank, "
            f"{sizes.num_accumulation_steps} time(s)."
        )
    if writes and is_main_process():
        path = os.path.join(output_dir, CONFIG)
        try:
            kept = save_config(output_dir, cfg)
            logger.info(
                "The whole config is in %s%s.",
                path,
                kept and f"; the config of the run before, which differs, is in {kept}",
            )
        except OSError as error:
            logger.error("The config cannot be saved: %s. The training continues.", error)
    # The run's files stay together if the program later changes its working directory.
    set_key(cfg, "train.output_dir", output_dir)
    if mesh.device_type == "cuda":
        _configure_nccl(cfg)


def complete_train_config(cfg: Any) -> None:
    """Write missing batch sizes and the number of samples into `cfg.train`; raises ConfigError if they contradict."""
    check_values(cfg)
    check_lone_keys(cfg)
    check_overrides(try_get_key(cfg, OVERRIDE_KEY) or (), (RESTART_DATA,))
    plan = step_plan(cfg)
    sizes = list(plan.sizes.values())
    set_key(cfg, "train.global_batch_size", plan.schedule.sizes[-1][1])
    # If there are several global batch sizes, values that differ between them are not written.
    if len({each.micro_batch_size for each in sizes}) == 1:
        set_key(cfg, "train.train_micro_batch_size", sizes[0].micro_batch_size)
    if len({each.num_accumulation_steps for each in sizes}) == 1:
        set_key(cfg, "train.num_accumulation_steps", sizes[0].num_accumulation_steps)
    samples = plan.schedule.position_of(cfg.train.train_iter or 0)
    require(cfg, "train.samples", samples, "train.train_iter and the batch sizes")


def seed_all(seed: int) -> None:
    """Seed the generators of this rank: Python's, numpy's, OneFlow's. Ranks that differ on another axis than the tensor
    axis get other seeds.

    Ranks of one tensor-parallel group have copies of the same tensors, so they must draw the same dropout masks. Order
    and transforms of samples do not depend on these generators.
    """
    import oneflow as flow

    seed_of_rank = seed + get_rank() // get_tensor_parallel_size()
    random.seed(seed_of_rank)
    np.random.seed(seed_of_rank % 2**32)
    with generators_in_turn():
        flow.manual_seed(seed_of_rank)
        if flow.cuda.is_available():
            flow.cuda.manual_seed(seed_of_rank)


def set_key(cfg: Any, key: str, value: Any) -> None:
    """Set a dotted key of a config, also if the config does not have it yet."""
    OmegaConf.update(cfg, key, value, force_add=True)


def _configure_nccl(cfg: Any) -> None:
    import oneflow as flow

    flow.boxing.nccl.set_fusion_threshold_mbytes(try_get_key(cfg, "train.nccl_fusion_threshold_mb", default=16))
    flow.boxing.nccl.set_fusion_max_ops_num(try_get_key(cfg, "train.nccl_fusion_max_ops", default=24))
    if try_get_key(cfg, "train.rdma_enabled", default=False) and get_world_size() > 1:
        flow.env.init_rdma()
