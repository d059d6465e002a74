"""The hooks of a `DefaultTrainer`, as its config describes them."""

from __future__ import annotations

import logging
import sys
import weakref
from typing import Any

from libai_data.config import try_get_key
from libai_data.config.defaults import KEYS
from libai_data.data.attributes import attribute_of
from libai_data.engine import hooks
from libai_data.engine.built_parts import built_by
from libai_data.engine.data_state import schedule_of
from libai_data.engine.hooks.checkpointing import DEFAULT_METRIC
from libai_data.engine.train_loop import HookBase
from libai_data.engine.writers import EventWriter, JSONWriter
from libai_data.errors import ConfigError
from libai_data.mesh.current import broadcast_py_object, is_main_process

logger = logging.getLogger(__name__)

_STOP_SIGNALS = ("SIGTERM", "SIGUSR1")


def default_hooks(owner: Any) -> list[HookBase | None]:
    """Hooks for timing, learning rate, checkpoints, evaluation, best checkpoint, early stopping, writing, stopping on a
    signal."""
    cfg, train = owner.cfg, owner.cfg.train
    # A weak reference, to avoid a cycle: the garbage collector would end the trainer's graphs at another time on each
    # rank, and the ranks would wait for each other.
    trainer = weakref.proxy(owner)
    schedule = schedule_of(owner.train_loader, owner.global_batch_size)
    built: list[HookBase | None] = [
        hooks.IterationTimer(schedule, train.log_period),
        hooks.DataProgress(
            owner.train_loader,
            owner.global_batch_size,
            train.log_period,
            owner.tokens.take,
            lambda: trainer.tokens.sources,
        ),
        hooks.LRScheduler(),
    ]
    checkpoints = hooks.PeriodicCheckpointer(
        owner.checkpointer, train.checkpointer.period, max_to_keep=train.checkpointer.max_to_keep
    )
    writers = built_by(owner, "build_writers") if is_main_process() else []
    evaluations = _evaluation_hooks(owner, trainer, writers) if train.evaluation.enabled and owner.test_loader else []
    if train.evaluation.enabled and not owner.test_loader:
        _warn_without_test_loader(train)
    early_stopping = _early_stopping(train, has_evaluations=bool(evaluations))
    # If an evaluation may end the training, the checkpoint of the same step must store its result. Otherwise the
    # checkpoint comes first, because an evaluation may fail.
    built += [checkpoints, *evaluations] if early_stopping is None else [*evaluations, early_stopping, checkpoints]
    if is_main_process():
        built.append(hooks.PeriodicWriter(writers, train.log_period))
        wants_bar = try_get_key(cfg, "train.progress_bar")
        # `sys.stderr` is None in a process that was started without it.
        if bool(sys.stderr and sys.stderr.isatty()) if wants_bar is None else wants_bar:
            built.append(hooks.ProgressBar())
    signals = try_get_key(cfg, "train.checkpointer.stop_signals")
    built.append(hooks.StopOnSignal(_STOP_SIGNALS if signals is None else list(signals)))
    return built


def _evaluation_hooks(owner: Any, trainer: Any, writers: list[EventWriter]) -> list[HookBase]:
    train_loader = owner.train_loader
    if attribute_of(train_loader, "endless") is not None and any(each is train_loader for each in owner.test_loader):
        raise ConfigError(
            f"the train loader ({type(train_loader).__name__}) is a test loader too, so evaluations would take batches "
            "from the training; build a second loader of the same dataset"
        )
    evaluation = owner.cfg.train.evaluation
    metric = try_get_key(evaluation, "eval_metric", default=DEFAULT_METRIC)
    mode = try_get_key(evaluation, "eval_mode", default="max")

    def was_missed(step: int) -> bool:
        if trainer.checkpointer.last_step != step:
            return False
        return bool(broadcast_py_object(any(isinstance(each, JSONWriter) and each.lacks(step) for each in writers)))

    return [
        hooks.EvalHook(evaluation.eval_period, lambda: trainer._evaluate(), was_missed),
        hooks.BestCheckpointer(evaluation.eval_period, owner.checkpointer, metric, mode, was_missed=was_missed),
    ]


def _warn_without_test_loader(train: Any) -> None:
    keys = {name: f"train.evaluation.{name}" for name in train.evaluation if name not in ("enabled", "evaluator")}
    idle = [key for name, key in keys.items() if train.evaluation[name] != KEYS[key].default]
    if idle:
        logger.warning(
            "There is no test loader (dataloader.test), so the training has no evaluation, and %s no effect.",
            f"{', '.join(idle)} {'has' if len(idle) == 1 else 'have'}",
        )


def _early_stopping(train: Any, has_evaluations: bool) -> HookBase | None:
    asked = train.early_stopping
    if asked.patience is None:
        return None
    if not has_evaluations or not train.evaluation.eval_period:
        raise ConfigError(
            f"train.early_stopping.patience is {asked.patience}, but the training has no evaluation before its end: it "
            "needs dataloader.test, train.evaluation.enabled=True and train.evaluation.eval_period above 0"
        )
    return hooks.EarlyStopping(
        train.evaluation.eval_period,
        asked.metric or train.evaluation.eval_metric,
        asked.patience,
        asked.min_delta,
        asked.mode or train.evaluation.eval_mode,
    )
