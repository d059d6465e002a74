"""The training loop: a trainer runs the steps, and hooks do all other work before and after them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from libai_data.engine.events import EventStorage, get_event_storage
from libai_data.engine.losses import LossBuffer
from libai_data.errors import ContractError
from libai_data.launch.launcher import STOPPED
from libai_data.mesh.current import get_rank
from libai_data.mesh.peers.liveness import begin_collective

logger = logging.getLogger(__name__)


class TrainingStopped(SystemExit):
    """Ends a training that was asked to stop, and with it the process, with code `launch.exit_codes.STOPPED`."""

    def __init__(self) -> None:
        super().__init__(STOPPED)


class HookBase:
    """Base of hooks, which do something before or after training steps.

    The trainer calls its hooks in the order in which they were registered::

        hook.before_train()
        for iter in range(start_iter, max_iter):
            hook.before_step()
            trainer.run_step()
            hook.after_step()
        hook.after_train()          # or hook.on_stop(), when a hook's before_step raised TrainingStopped
        hook.close()

    Do time-consuming work in `after_step`, so that hooks that measure the step measure nothing else. If a step fails,
    only `close` is called, and not `after_train`, because the other ranks may never reach it.

    Attributes:
        trainer: the trainer, set when the hook is registered (a weak reference).
    """

    trainer: Any = None

    def before_train(self) -> None:
        """Called before the first step."""

    def after_train(self) -> None:
        """Called after the last step, if no step failed; then `self.trainer.iter` is `max_iter`."""

    def on_stop(self) -> None:
        """Called instead of `after_train` when all ranks stop before step `self.trainer.iter`, by `TrainingStopped`."""

    def before_step(self) -> None:
        """Called before each step."""

    def after_step(self) -> None:
        """Called after each step."""

    def close(self) -> None:
        """Called at the very end, also after a failure: close files. Do not communicate with other ranks."""


class TrainerBase:
    """A loop with hooks; subclasses define the step.

    Attributes:
        iter: index of the current step. A step is one update of the weights, in eager and in graph mode, whatever the
            number of micro-batches in it. After a complete training, `iter` equals `max_iter`.
        start_iter: index of the first step.
        max_iter: index of the last step, plus one.
        ended_at: `iter` when a training last ended with all that follows its steps, such as the last evaluation.
        storage: the scalars measured during `train`.
        losses: losses that were not read from their devices yet.
    """

    def __init__(self) -> None:
        self._hooks: list[HookBase] = []
        self.iter = 0
        self.start_iter = 0
        self.max_iter = 0
        self.ended_at = -1
        self.storage: EventStorage = EventStorage()
        self.losses = LossBuffer()

    def register_hooks(self, hooks: Iterable[HookBase | None]) -> None:
        """Add hooks after those already registered; skips None, and raises TypeError for other objects."""
        for hook in hooks:
            if hook is None:
                continue
            if not isinstance(hook, HookBase):
                raise TypeError(f"a hook must derive from HookBase, got {type(hook).__name__}")
            hook.trainer = weakref.proxy(self)
            self._hooks.append(hook)

    def train(self, start_iter: int, max_iter: int) -> Any:
        """Run the steps [start_iter, max_iter) and the hooks around them.

        Raises:
            TrainingStopped: A hook stopped the training, before the same step on all ranks.
        """
        logger.info("Training from iteration %d to %d.", start_iter, max_iter)
        self.iter = self.start_iter = start_iter
        self.max_iter = max_iter
        self.losses.forget_from(start_iter)
        with EventStorage(start_iter) as self.storage:
            try:
                self.before_train()
                while self.iter < self.max_iter:
                    self.before_step()
                    self.run_step()
                    self.after_step()
                    self.iter += 1
                # So the error names the end of a rank on which alone a hook has changed `max_iter`.
                begin_collective(f"the end of the training (trainer.max_iter = {self.max_iter})")
                self.losses.read_into(self.storage)
                self.storage.iter = self.iter - 1  # also if there was no step
                self.after_train()
                self.ended_at = self.iter
            except TrainingStopped:
                self.losses.read_into(self.storage)
                for hook in self._hooks:
                    hook.on_stop()
                raise
            finally:
                self._close_hooks()

    def before_train(self) -> None:
        self._call_hooks("before_train")

    def after_train(self) -> None:
        self._call_hooks("after_train")

    def before_step(self) -> None:
        self.storage.iter = self.iter
        self._call_hooks("before_step")

    def after_step(self) -> None:
        self._call_hooks("after_step")

    def end_after_step(self) -> None:
        """End the training normally after the current step. Hooks call this, on all ranks at the same step."""
        self.max_iter = self.iter + 1

    def ends_period(self, period: int) -> bool:
        """Whether the current step is the last of `period` steps, or of the training."""
        return (self.iter + 1) % period == 0 or self.iter == self.max_iter - 1

    def run_step(self) -> None:
        """Run one step; subclasses must implement this."""
        raise NotImplementedError(f"{type(self).__name__} must implement run_step()")

    def write_metrics(self, loss_dict: Mapping[str, Any], data_time: float, prefix: str = "") -> None:
        """Record the losses of this step, without waiting for the devices that still compute them.

        On logging steps (`LossBuffer.period`), the losses are read and put into the storage. Collective: every rank
        calls this method in every step.

        Args:
            loss_dict: scalar tensors, global or local.
            data_time: seconds this rank waited for the step's data.
            prefix: prefix of the names.
        """
        storage = get_event_storage()
        storage.put_scalar(prefix + "data_time", data_time, iteration=self.iter)
        self.losses.add(self.iter, {prefix + name: value for name, value in loss_dict.items()})
        if self.losses.is_due(self.iter) or self.iter == self.max_iter - 1:
            self.losses.read_into(storage, prefix)

    def _call_hooks(self, method: str) -> None:
        step = self.iter
        for hook in self._hooks:
            getattr(hook, method)()
            if self.iter != step:  # The ranks would wait for each other in different steps.
                raise ContractError(
                    f"{type(hook).__name__}.{method} changed trainer.iter from {step} to {self.iter} on rank "
                    f"{get_rank()}; only the trainer counts the steps. To end the training, let all ranks call "
                    "trainer.end_after_step()"
                )

    def _close_hooks(self) -> None:
        """Close every hook. Log the error of one that fails, to close the others too and to keep an earlier error."""
        for hook in self._hooks:
            try:
                hook.close()
            except Exception:
                logger.exception("%s.close() failed.", type(hook).__name__)
