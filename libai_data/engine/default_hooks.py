"""The hooks of a `DefaultTrainer`, by its config."""

from __future__ import annotations

import weakref
from typing import Any

from libai_data.config import try_get_key
from libai_data.engine import hooks
from libai_data.engine.data_state import schedule_of
from libai_data.engine.hooks.evaluation import DEFAULT_METRIC
from libai_data.engine.logging_setup import has_progress_bar
from libai_data.engine.train_loop import HookBase
from libai_data.mesh.current import is_main_process

_STOP_SIGNALS = ("SIGTERM", "SIGUSR1")


def default_hooks(owner: Any) -> list[HookBase | None]:
    """Hooks for timing, learning rate, checkpoints, evaluation, best checkpoint, writing, stopping on a signal."""
    cfg, train = owner.cfg, owner.cfg.train
    # Weakly, for the sake of graphs: with a cycle, the garbage collector would end a trainer's graphs at another moment
    # on each rank, in which they would wait for each other.
    trainer = weakref.proxy(owner)
    schedule = schedule_of(owner.train_loader, owner.global_batch_size)
    built: list[HookBase | None] = [
        hooks.IterationTimer(schedule, train.log_period),
        hooks.DataProgress(
            owner.train_loader,
            owner.global_batch_size,
            train.log_period,
            lambda: trainer._tokens_per_sample,
        ),
        hooks.LRScheduler(),
        hooks.PeriodicCheckpointer(
            owner.checkpointer, train.checkpointer.period, max_to_keep=train.checkpointer.max_to_keep
        ),
    ]
    if train.evaluation.enabled and owner.test_loader:
        metric = try_get_key(cfg, "train.evaluation.eval_metric", default=DEFAULT_METRIC)
        mode = try_get_key(cfg, "train.evaluation.eval_mode", default="max")
        period = train.evaluation.eval_period
        built.append(hooks.EvalHook(period, lambda: trainer._evaluate()))
        built.append(hooks.BestCheckpointer(period, owner.checkpointer, val_metric=metric, mode=mode))
    if is_main_process():
        built.append(hooks.PeriodicWriter(owner.build_writers(), train.log_period))
        if has_progress_bar():
            built.append(hooks.ProgressBar())
    signals = try_get_key(cfg, "train.checkpointer.stop_signals")
    built.append(hooks.StopOnSignal(_STOP_SIGNALS if signals is None else list(signals)))
    return built
