"""Ends a training that no longer improves."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from libai_data.engine.hooks.checkpointing import validation_name
from libai_data.engine.train_loop import HookBase
from libai_data.errors import ConfigError, nearest
from libai_data.errors.argument_rules import check, one_of, real, whole
from libai_data.mesh.current import broadcast_py_object

logger = logging.getLogger(__name__)

_RULES = {"eval_period": whole(1), "patience": whole(1), "min_delta": real(0, 1e300), "mode": one_of("max", "min")}


class EarlyStopping(HookBase):
    """Ends the training after `patience` evaluations in a row without a better value of a metric. Register it after
    `EvalHook`.

    All ranks end after the same step, with the final checkpoint and evaluation of a training that is complete. A
    checkpoint that is written after this hook stores the state. A training that ended early does not continue when it
    is resumed, unless `patience` is increased.

    Args:
        eval_period: the same as that of `EvalHook`.
        metric: name of the metric, e.g. "Acc@1"; "loss" is the loss of the evaluation.
        patience: evaluations without an improvement.
        min_delta: a smaller change is no improvement.
        mode: "max" if larger is better, otherwise "min".
    """

    def __init__(
        self, eval_period: int, metric: str, patience: int = 3, min_delta: float = 0.0, mode: str = "max"
    ) -> None:
        check(_RULES, eval_period=eval_period, patience=patience, min_delta=min_delta, mode=mode)
        self._period = eval_period
        self._metric = validation_name(metric)
        self._patience = patience
        self._min_delta = min_delta
        self._mode = mode
        self.best: float | None = None
        self.best_iter = -1
        self.evaluations_since_best = 0

    def state_dict(self) -> dict[str, Any]:
        """The best value, its iteration, and the evaluations since."""
        return {
            "metric": self._metric,
            "mode": self._mode,
            "best": self.best,
            "best_iter": self.best_iter,
            "evaluations_since_best": self.evaluations_since_best,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; a state of another metric is ignored."""
        if (state["metric"], state["mode"]) == (self._metric, self._mode):
            self.best, self.best_iter = state["best"], state["best_iter"]
            self.evaluations_since_best = state["evaluations_since_best"]

    def before_train(self) -> None:
        if self.evaluations_since_best >= self._patience:
            self._log("The run has ended early")
            self.trainer.max_iter = self.trainer.start_iter

    def after_step(self) -> None:
        done = self.trainer.iter + 1
        if done % self._period or done == self.trainer.max_iter:
            return
        # Rank 0 decides, so that all ranks end, or none.
        self._note(broadcast_py_object(self._latest()))
        if self.evaluations_since_best >= self._patience:
            self._log("The training ends early")
            self.trainer.end_after_step()

    def _note(self, value: float) -> None:
        sign = 1.0 if self._mode == "max" else -1.0
        if math.isfinite(value) and (self.best is None or sign * (value - self.best) > self._min_delta):
            self.best, self.best_iter, self.evaluations_since_best = value, self.trainer.iter, 0
        else:
            self.evaluations_since_best += 1

    def _latest(self) -> float:
        latest = self.trainer.storage.latest()
        if self._metric not in latest:
            raise ConfigError(
                f"train.early_stopping.metric is {self._metric!r}, but the evaluation has no such result; there are "
                f"{sorted(latest)}.{nearest(self._metric, latest)}"
            )
        return float(latest[self._metric][0])

    def _log(self, what: str) -> None:
        best = "no finite value" if self.best is None else f"{self.best:.4f} after iteration {self.best_iter}"
        logger.info(
            "%s: %s has not improved for %d evaluations (train.early_stopping.patience); the best is %s.",
            what,
            self._metric,
            self.evaluations_since_best,
            best,
        )
