"""Evaluation during and after the training."""

from __future__ import annotations

from typing import Any, Callable

from libai_data.config.argument_rules import check, whole
from libai_data.engine.evaluation.results import flatten_results_dict
from libai_data.engine.train_loop import HookBase
from libai_data.mesh.current import synchronize


class EvalHook(HookBase):
    """Runs an evaluation every `eval_period` steps and after the last step, and puts its results. On every rank.

    Args:
        eval_period: in steps; 0 to evaluate only at the end.
        eval_function: takes nothing, returns a (nested) dict of numbers.
    """

    def __init__(self, eval_period: int, eval_function: Callable[[], dict[str, Any]]) -> None:
        check({"eval_period": whole(0)}, eval_period=eval_period)
        self._period = eval_period
        self._eval_function = eval_function

    def after_step(self) -> None:
        """Evaluate, where it is due; the last evaluation is left to `after_train`."""
        done = self.trainer.iter + 1
        if self._period > 0 and done % self._period == 0 and done != self.trainer.max_iter:
            self._evaluate()

    def after_train(self) -> None:
        """Evaluate a last time."""
        self._evaluate()

    def _evaluate(self) -> None:
        results = self._eval_function()
        for name, value in flatten_results_dict(results or {}).items():
            try:
                number = float(value)
            except (TypeError, ValueError):
                raise TypeError(
                    f"evaluation result '{name}' is a {type(value).__name__}; an evaluator must return numbers, or "
                    "dicts of them"
                ) from None
            self.trainer.storage.put_scalar(name, number, smoothing_hint=False)
        synchronize()
