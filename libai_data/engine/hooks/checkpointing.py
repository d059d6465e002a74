"""When checkpoints are written."""

from __future__ import annotations

import logging

from libai_data.config.argument_rules import check, or_none, whole
from libai_data.engine.checkpoint import Checkpointer
from libai_data.engine.train_loop import HookBase
from libai_data.errors import CheckpointError

logger = logging.getLogger(__name__)


class PeriodicCheckpointer(HookBase):
    """Writes a checkpoint every `period` steps, and one named "<prefix>_final" after the last.

    A periodic checkpoint that cannot be written (a full disk) is reported, and the training goes on with the older
    ones; the last one must be written, and so must that of a training that is asked to stop.

    Args:
        checkpointer: writes them.
        period: in steps.
        max_to_keep: keep so many, and remove older ones; None keeps all. "<prefix>_final" does not count.
        file_prefix: what their names begin with; then comes the index of the step just done, in 7 digits.
    """

    def __init__(
        self, checkpointer: Checkpointer, period: int, max_to_keep: int | None = None, file_prefix: str = "model"
    ) -> None:
        check({"period": whole(1), "max_to_keep": or_none(whole(1))}, period=period, max_to_keep=max_to_keep)
        self._checkpointer = checkpointer
        self._period = period
        self._max_to_keep = max_to_keep
        self._prefix = file_prefix
        self._recent: list[str] = []

    def before_train(self) -> None:
        """Count those that the resumed run left."""
        self._recent = self._checkpointer.names_before(self._prefix, self.trainer.start_iter)

    def after_step(self) -> None:
        """Write, where it is due, and remove what is too old."""
        iteration = self.trainer.iter
        if (iteration + 1) % self._period:
            return
        try:
            self._save(iteration)
        except CheckpointError as error:
            logger.error("%s The training goes on; earlier checkpoints are untouched.", error)

    def on_stop(self) -> None:
        """Write one of the step done last, unless there is one."""
        iteration = self.trainer.iter - 1
        if iteration >= self.trainer.start_iter and self._name(iteration) not in self._recent:
            self._save(iteration)

    def after_train(self) -> None:
        """Write the last one."""
        if self.trainer.iter > self.trainer.start_iter:
            self._checkpointer.save(f"{self._prefix}_final", iteration=self.trainer.iter - 1)

    def _name(self, iteration: int) -> str:
        return f"{self._prefix}_{iteration:07d}"

    def _save(self, iteration: int) -> None:
        self._checkpointer.save(self._name(iteration), iteration=iteration)
        self._recent.append(self._name(iteration))
        if self._max_to_keep is not None:
            while len(self._recent) > self._max_to_keep:
                self._checkpointer.remove(self._recent.pop(0))
