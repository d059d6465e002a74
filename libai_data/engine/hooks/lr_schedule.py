"""The learning rate, step by step."""

from __future__ import annotations

from collections import Counter
from typing import Any

from libai_data.engine.train_loop import HookBase


class LRScheduler(HookBase):
    """Puts the learning rate of the step just done as "lr", and steps the schedule.

    In graph mode the graph counts its own steps, and this eager copy of the schedule serves to show the rate.

    Args:
        optimizer: by default the trainer's.
        scheduler: by default the trainer's `lr_scheduler`.
    """

    def __init__(self, optimizer: Any = None, scheduler: Any = None) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._group = 0

    @property
    def scheduler(self) -> Any:
        """The schedule that is stepped."""
        return self._scheduler if self._scheduler is not None else self.trainer.lr_scheduler

    def before_train(self) -> None:
        """Choose the parameter group to report."""
        optimizer = self._optimizer if self._optimizer is not None else self.trainer.optimizer
        self._group = self.get_best_param_group_id(optimizer)

    @staticmethod
    def get_best_param_group_id(optimizer: Any) -> int:
        """The group whose learning rate stands for all: that of most parameters, or of the most common rate."""
        sizes = [len(group.parameters) for group in optimizer.param_groups]
        if max(sizes) > 1:
            return sizes.index(max(sizes))
        rates = [group["lr"] for group in optimizer.param_groups]
        return rates.index(Counter(rates).most_common(1)[0][0])

    def after_step(self) -> None:
        """Report the rate, then step."""
        self.trainer.storage.put_scalar("lr", self.scheduler.get_last_lr()[self._group], smoothing_hint=False)
        self.scheduler.step()
