"""What a training measures: its speed, its position in the data, its learning rate."""

from __future__ import annotations

import datetime
import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Callable

from libai_data.data.samplers.schedule import StepSchedule
from libai_data.engine.checkpoint.changed_attributes import ChangedAttributes, changed_in_optimizer
from libai_data.engine.data_state import schedule_of, stream_state_of
from libai_data.engine.train_loop import HookBase
from libai_data.engine.writers import SOURCE
from libai_data.errors.argument_rules import check, whole
from libai_data.errors.saved_state import Keys, check_state

logger = logging.getLogger(__name__)

_COUNTED = Keys({"step": whole(0), "samples": whole(0)})


class IterationTimer(HookBase):
    """Measures the steps between two logging steps.

    OneFlow computes asynchronously, so the time of a single step means little. The time between two readings of the
    losses, which wait for the devices, is exact. The time of other hooks (evaluation, checkpoints) does not count.

    It logs "time" (seconds per step), "samples_per_second", "data_wait_share" (0 to 1) and "eta_seconds". Register it
    first.

    Args:
        steps: samples of one step, over all ranks, or a schedule of them.
        period: number of steps to measure together.
        warmup_iter: number of first steps that the summary does not count, because they include compilation.
    """

    def __init__(self, steps: int | StepSchedule, period: int = 20, warmup_iter: int = 3) -> None:
        check({"period": whole(1), "warmup_iter": whole(0)}, period=period, warmup_iter=warmup_iter)
        self._schedule = steps if isinstance(steps, StepSchedule) else StepSchedule(((0, steps),))
        self._period = period
        self._warmup_iter = warmup_iter
        self._all_steps, self._all_samples, self._all_seconds = 0, 0, 0.0
        self._next_step = 0
        self._other = 0  # samples that the training has used, and the schedule does not count

    def state_dict(self) -> dict[str, int]:
        """The next step, and the number of samples before this step."""
        return {"step": self._next_step, "samples": self._used_before(self._next_step)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue the count of samples: the steps before may have had other sizes, or another dataset."""
        check_state(state, _COUNTED, "a training", "IterationTimer", "the checkpoint")
        self._next_step = state["step"]
        self._other = state["samples"] - self._schedule.position_of(state["step"])

    def _used_before(self, step: int) -> int:
        return self._schedule.position_of(step) + self._other

    def before_train(self) -> None:
        self._next_step = self.trainer.start_iter
        self._train_start = time.perf_counter()
        self._begin_period()

    def _begin_period(self) -> None:
        self._steps, self._seconds, self._waits = 0, 0.0, 0.0

    def before_step(self) -> None:
        self._step_start = time.perf_counter()

    def after_step(self) -> None:
        seconds = time.perf_counter() - self._step_start
        iteration = self.trainer.iter
        self._steps, self._next_step = self._steps + 1, iteration + 1
        self._seconds += seconds
        waited, measured_at = self.trainer.storage.latest().get("data_time", (0.0, -1))
        self._waits += waited if measured_at == iteration else 0.0
        if iteration - self.trainer.start_iter >= self._warmup_iter:
            self._all_steps += 1
            self._all_samples += self._schedule.size_of(iteration)
            self._all_seconds += seconds
        if self.trainer.ends_period(self._period):
            self._put(iteration)

    def after_train(self) -> None:
        total = time.perf_counter() - self._train_start
        if self._all_steps:
            per_step = self._all_seconds / self._all_steps
            logger.info(
                f"Trained at {per_step:.4f} s/step, {self._all_samples / self._all_seconds:.1f} samples/s (the first "
                f"{self._warmup_iter} steps left out)."
            )
        logger.info("Training took %s, evaluation and checkpoints included.", datetime.timedelta(seconds=round(total)))

    def _put(self, iteration: int) -> None:
        storage = self.trainer.storage
        per_step = self._seconds / self._steps
        position_of = self._schedule.position_of
        samples = position_of(iteration + 1) - position_of(iteration + 1 - self._steps)
        storage.put_scalars(
            smoothing_hint=False,
            time=per_step,
            samples_per_second=samples / max(self._seconds, 1e-9),
            data_wait_share=min(self._waits / max(self._seconds, 1e-9), 1.0),
            eta_seconds=per_step * (self.trainer.max_iter - iteration - 1),
        )
        storage.samples = self._used_before(iteration + 1)
        storage.put_scalar("consumed_samples", storage.samples, smoothing_hint=False)
        self._begin_period()


class DataProgress(HookBase):
    """Logs the position in the stream after each logging step; the numbers are the same on every mesh.

    It logs "epoch" (with a fraction), "position" (the place in the order after the last sample, which
    counts skipped samples too; of a filter or packer in lanes that of the lane that has come furthest),
    "consumed_tokens", "tokens_per_second", and "consumed_tokens/<dataset>" for each dataset of a blend, if they are
    known. `IterationTimer`, which runs before this hook, logs "consumed_samples".

    Args:
        global_batch_size: samples of a step, for loaders without a schedule.
        period: in steps.
        tokens: called with the samples of the whole training and those since the last call; returns the tokens of both,
            0 if they are not known. `TokenCounter.take` also lets rank 0 know the starts of all lanes, without which
            "epoch" and "position" are not logged.
        sources: called after `tokens`; returns the tokens of each dataset so far.
    """

    def __init__(
        self,
        loader: Any,
        global_batch_size: int,
        period: int,
        tokens: Callable[[int, int], tuple[int, int]] = lambda samples, new: (0, 0),
        sources: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        check({"period": whole(1)}, period=period)
        self._loader = loader
        self._schedule = schedule_of(loader, global_batch_size)
        self._period = period
        self._tokens = tokens
        self._sources = sources

    def before_train(self) -> None:
        self._last_put = self.trainer.start_iter - 1
        self._tokens(self._schedule.position_of(self.trainer.start_iter), 0)

    def after_step(self) -> None:
        if not self.trainer.ends_period(self._period):
            return
        iteration, storage = self.trainer.iter, self.trainer.storage
        numbers: dict[str, float] = {}
        # `IterationTimer`, which may be missing, also counts samples of steps before a resume with other sizes.
        samples = getattr(storage, "samples", 0) or self._schedule.position_of(iteration + 1)
        new_samples = self._schedule.position_of(iteration + 1) - self._schedule.position_of(self._last_put + 1)
        tokens, new = self._tokens(samples, new_samples)
        state = stream_state_of(self._loader)
        if state is not None and state.is_whole:
            numbers.update(position=state.place, epoch=state.place / state.order.epoch_size)
        if tokens:
            numbers["consumed_tokens"] = tokens
            seconds, measured_at = storage.latest().get("time", (0.0, -1))
            if measured_at == iteration and seconds > 0:
                numbers["tokens_per_second"] = new / (seconds * (iteration - self._last_put))
            numbers.update((f"{SOURCE}{name}", count) for name, count in self._sources().items())
        storage.put_scalars(smoothing_hint=False, **numbers)
        self._last_put = iteration


class LRScheduler(HookBase):
    """Puts the learning rate of the finished step as "lr", and steps the schedule; by default, that of the trainer.

    In eager mode, this is the rate of the optimizer, which other code may have set. In graph mode, the graph counts its
    own steps, and this eager copy of the schedule only shows the rate. So this hook warns if a training changes rates
    or options of the optimizer, which a compiled graph ignores.
    """

    def __init__(self, optimizer: Any = None, scheduler: Any = None) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._group = 0
        self._compiled: ChangedAttributes | None = None  # options that the graph is compiled with
        self._next_step: int | None = None  # the step that the schedule's rate is for

    @property
    def scheduler(self) -> Any:
        return self._scheduler if self._scheduler is not None else self.trainer.lr_scheduler

    @property
    def optimizer(self) -> Any:
        return self._optimizer if self._optimizer is not None else self.trainer.optimizer

    def before_train(self) -> None:
        self._group = self.get_best_param_group_id(self.optimizer)
        self._next_step = self.trainer.start_iter

    @staticmethod
    def get_best_param_group_id(optimizer: Any) -> int:
        """Index of the group whose learning rate is logged: the largest group, or one with the most common rate."""
        sizes = [len(group.parameters) for group in optimizer.param_groups]
        if max(sizes) > 1:
            return sizes.index(max(sizes))
        rates = [group["lr"] for group in optimizer.param_groups]
        return rates.index(Counter(rates).most_common(1)[0][0])

    def after_step(self) -> None:
        rates = self.scheduler.get_last_lr()
        is_first = self._compiled is None and self.trainer.iter == self.trainer.start_iter
        if is_first and self._is_of_graph():  # The step has compiled the graph.
            self._compiled = changed_in_optimizer(self.trainer.model, self.trainer.optimizer)
        if self._compiled is not None and self.trainer.losses.is_due(self.trainer.iter):
            self._warn_of_ignored(self._compiled, rates)
        rate = rates[self._group] if self._is_of_graph() else self.optimizer.param_groups[self._group]["lr"]
        self.trainer.storage.put_scalar("lr", rate, smoothing_hint=False)
        self.scheduler.step()
        self._next_step = self.trainer.iter + 1

    def close(self) -> None:
        """Step the schedule if a hook before this one was interrupted after a step: its checkpoint may be saved now."""
        last_step = getattr(getattr(self.trainer, "checkpointer", None), "last_step", -1)
        if last_step >= 0 and last_step == self._next_step:
            self.scheduler.step()
        self._next_step = None

    def _is_of_graph(self) -> bool:
        return getattr(self.trainer, "graph_train", None) is not None

    def _warn_of_ignored(self, compiled: ChangedAttributes, rates: list[float]) -> None:
        changed = compiled.changed()
        if [group["lr"] for group in self.trainer.optimizer.param_groups] != list(rates):
            changed.append("lr")
        if changed:
            self._compiled = None
            logger.warning(
                "Before the end of step %d, the optimizer's %s changed. The graph ignores this, because it was "
                "compiled with the values before the first step. Use eager mode (graph.enabled=False), or change the "
                "config and resume.",
                self.trainer.iter,
                ", ".join(changed),
            )
