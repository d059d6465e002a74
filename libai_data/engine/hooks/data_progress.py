"""How far the training has come in its data."""

from __future__ import annotations

from typing import Any, Callable

from libai_data.config.argument_rules import check, whole
from libai_data.engine.data_state import schedule_of, stream_state_of
from libai_data.engine.train_loop import HookBase


class DataProgress(HookBase):
    """On each logging step, puts where the stream stands behind it; the same numbers on every mesh.

    Puts "epoch" (with its fraction that is done), "position" (the place in the order behind the last sample, what was
    left out on purpose included) and "consumed_tokens", as far as they are known. "consumed_samples" is put by
    `IterationTimer`.

    Args:
        loader: the train loader.
        global_batch_size: of a step, for loaders that know no steps.
        period: in steps.
        tokens_per_sample: tokens of a sample, called after the first step; 0 if it is not known.
    """

    def __init__(
        self, loader: Any, global_batch_size: int, period: int, tokens_per_sample: Callable[[], int] = lambda: 0
    ) -> None:
        check({"period": whole(1)}, period=period)
        self._loader = loader
        self._schedule = schedule_of(loader, global_batch_size)
        self._period = period
        self._tokens_per_sample = tokens_per_sample

    def after_step(self) -> None:
        """Put, where it is due."""
        iteration = self.trainer.iter
        if (iteration + 1) % self._period and iteration != self.trainer.max_iter - 1:
            return
        numbers: dict[str, float] = {}
        state = stream_state_of(self._loader)
        if state is not None:
            numbers.update(position=state.place, epoch=state.place / state.order.epoch_size)
        tokens = self._tokens_per_sample()
        if tokens:
            numbers["consumed_tokens"] = self._schedule.position_of(iteration + 1) * tokens
        self.trainer.storage.put_scalars(smoothing_hint=False, **numbers)
