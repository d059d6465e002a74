"""Shows what a training measures: by writers, and by a live bar on a terminal."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from libai_data.data.progress_bar import progress_bar
from libai_data.engine.logging_setup import set_bar
from libai_data.engine.train_loop import HookBase
from libai_data.engine.writers import EventWriter
from libai_data.errors.argument_rules import check, whole

logger = logging.getLogger(__name__)


class PeriodicWriter(HookBase):
    """Calls its writers every `period` steps, after each evaluation, and after the last step.

    Register it last, so that the numbers of the other hooks are written. A writer that fails (on a full disk, say) is
    named in the log, and the training continues without its output.

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
        self._failing: set[int] = set()  # places in `writers`

    def before_train(self) -> None:
        if self.trainer.storage.is_due:  # An evaluation was repeated, and the next one may follow after one step.
            self._write()

    def after_step(self) -> None:
        if self.trainer.ends_period(self._period) or self.trainer.storage.is_due:
            self._write()

    def after_train(self) -> None:
        self._write()

    def on_stop(self) -> None:
        self._write()

    def close(self) -> None:
        for writer in self._writers:
            try:
                writer.close()
            except Exception:
                logger.exception("%s.close() failed.", type(writer).__name__)

    def _write(self) -> None:
        self.trainer.storage.is_due = False
        for place, writer in enumerate(self._writers):
            try:
                writer.write()
                self._failing.discard(place)
            except Exception as error:
                # Report only the first failure: a full disk often stays full for a while.
                if place not in self._failing:
                    traceback = None if isinstance(error, OSError) else error
                    name = type(writer).__name__
                    logger.error("%s cannot write: %s. The training continues.", name, error, exc_info=traceback)
                self._failing.add(place)


class ProgressBar(HookBase):
    """Live bar on rank 0: finished steps, loss, samples/s, the share of time spent waiting for data, time left."""

    def __init__(self) -> None:
        self._bar: Any = None

    def before_train(self) -> None:
        set_bar(True)
        self._bar = progress_bar(
            total=self.trainer.max_iter,
            initial=self.trainer.start_iter,
            unit="step",
            dynamic_ncols=True,
            bar_format="{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
        )

    def after_step(self) -> None:
        self._bar.set_postfix(self._numbers(), refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            set_bar(False)

    def _numbers(self) -> dict[str, str]:
        latest = self.trainer.storage.latest()
        forms = (
            ("loss", "total_loss", "{:.4g}"),
            ("samples/s", "samples_per_second", "{:.0f}"),
            ("data", "data_wait_share", "{:.0%}"),
        )
        return {label: form.format(latest[name][0]) for label, name, form in forms if name in latest}
