"""How fast the training goes, and what part of the time it waits for data."""

from __future__ import annotations

import datetime
import logging
import time

from libai_data.config.argument_rules import check, whole
from libai_data.data.samplers.schedule import StepSchedule
from libai_data.engine.train_loop import HookBase

logger = logging.getLogger(__name__)


class IterationTimer(HookBase):
    """Measures the steps, and on each logging step puts what they came to since the one before.

    OneFlow computes asynchronously, so a single step's time says little; over the steps between two readings of the
    losses, which wait for the devices, it is exact. Other hooks' time (evaluation, checkpoints) is left out.

    Puts "time" (seconds per step), "samples_per_second", "data_wait_share" (0 to 1) and "eta_seconds". To be the first
    hook.

    Args:
        steps: samples of one step, over all ranks, or the schedule that says how many a step takes.
        period: measure over so many steps.
        warmup_iter: so many first steps are left out of the summary, since they compile and fill caches.
    """

    def __init__(self, steps: int | StepSchedule, period: int = 20, warmup_iter: int = 3) -> None:
        check({"period": whole(1), "warmup_iter": whole(0)}, period=period, warmup_iter=warmup_iter)
        self._schedule = steps if isinstance(steps, StepSchedule) else StepSchedule(((0, steps),))
        self._period = period
        self._warmup_iter = warmup_iter
        self._steps = 0
        self._seconds = 0.0
        self._all_steps = 0
        self._all_samples = 0
        self._all_seconds = 0.0
        self._last_put = -1
        self._train_start = 0.0
        self._step_start = 0.0

    def before_train(self) -> None:
        """Start the clock of the whole training."""
        self._train_start = time.perf_counter()
        self._last_put = self.trainer.start_iter - 1

    def before_step(self) -> None:
        """Start the step's clock."""
        self._step_start = time.perf_counter()

    def after_step(self) -> None:
        """Stop the step's clock; on a logging step, put the rates."""
        seconds = time.perf_counter() - self._step_start
        iteration = self.trainer.iter
        self._steps += 1
        self._seconds += seconds
        if iteration - self.trainer.start_iter >= self._warmup_iter:
            self._all_steps += 1
            self._all_samples += self._schedule.size_of(iteration)
            self._all_seconds += seconds
        if (iteration + 1) % self._period == 0 or iteration == self.trainer.max_iter - 1:
            self._put(iteration)

    def after_train(self) -> None:
        """Log the summary."""
        total = time.perf_counter() - self._train_start
        if self._all_steps:
            per_step = self._all_seconds / self._all_steps
            logger.info(
                "Trained at %.4f s/step, %.1f samples/s (the first %d steps left out).",
                per_step,
                self._all_samples / self._all_seconds,
                self._warmup_iter,
            )
        logger.info("Training took %s, evaluation and checkpoints included.", datetime.timedelta(seconds=round(total)))

    def _put(self, iteration: int) -> None:
        storage = self.trainer.storage
        per_step = self._seconds / self._steps
        waits = storage.history("data_time").since(self._last_put) if "data_time" in storage.histories() else []
        position_of = self._schedule.position_of
        samples = position_of(iteration + 1) - position_of(iteration + 1 - self._steps)
        storage.put_scalars(
            smoothing_hint=False,
            time=per_step,
            samples_per_second=samples / max(self._seconds, 1e-9),
            data_wait_share=min(sum(waits) / max(self._seconds, 1e-9), 1.0),
            eta_seconds=per_step * (self.trainer.max_iter - iteration - 1),
        )
        storage.samples = position_of(iteration + 1)
        storage.put_scalar("consumed_samples", storage.samples, smoothing_hint=False)
        self._steps, self._seconds, self._last_put = 0, 0.0, iteration
