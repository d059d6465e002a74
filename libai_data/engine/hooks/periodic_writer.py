"""When writers write."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from libai_data.config.argument_rules import check, whole
from libai_data.engine.train_loop import HookBase
from libai_data.engine.writers import EventWriter

logger = logging.getLogger(__name__)


class PeriodicWriter(HookBase):
    """Calls its writers every `period` steps, after the last step, and once more for what came after that (an
    evaluation).

    To be the last hook, so that what the others put is written. A writer that fails (on a full disk, say) is named in
    the log, and the training goes on without what it should have written.

    Args:
        writers: on rank 0; the other ranks have none.
        period: in steps.
    """

    def __init__(self, writers: Sequence[EventWriter], period: int = 20) -> None:
        check({"period": whole(1)}, period=period)
        self._writers = list(writers)
        for writer in self._writers:
            if not isinstance(writer, EventWriter):
                raise TypeError(f"a writer must derive from EventWriter, got {type(writer).__name__}")
        self._period = period
        self._failing: set[EventWriter] = set()

    def after_step(self) -> None:
        """Write, where it is due."""
        iteration = self.trainer.iter
        if (iteration + 1) % self._period == 0 or iteration == self.trainer.max_iter - 1:
            self._write()

    def after_train(self) -> None:
        """Write what the last hooks put."""
        self._write()

    def on_stop(self) -> None:
        """Write what there is up to the step done last."""
        self._write()

    def close(self) -> None:
        """Close the writers."""
        for writer in self._writers:
            writer.close()

    def _write(self) -> None:
        for writer in self._writers:
            try:
                writer.write()
                self._failing.discard(writer)
            except Exception as error:
                # Once: a disk that is full stays so for a while.
                if writer not in self._failing:
                    traceback = None if isinstance(error, OSError) else error
                    name = type(writer).__name__
                    logger.error("%s cannot write: %s. The training goes on.", name, error, exc_info=traceback)
                self._failing.add(writer)
