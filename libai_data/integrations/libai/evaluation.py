"""LiBai's evaluators in this package's evaluation."""

from __future__ import annotations

from collections import abc
from typing import Any

from libai_data.engine.evaluation import DatasetEvaluator


class LiBaiEvaluator(DatasetEvaluator):
    """One of LiBai's evaluators, as ours.

    Args:
        evaluator: has `reset`, `process` and `evaluate`.
    """

    def __init__(self, evaluator: Any) -> None:
        self._evaluator = evaluator

    def reset(self) -> None:
        """Begin a new round."""
        self._evaluator.reset()

    def process(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        """Take one batch, without padding. Called on rank 0."""
        self._evaluator.process(inputs, outputs)

    def evaluate(self) -> Any:
        """Sum up. Called on every rank."""
        return self._evaluator.evaluate()


def own_evaluators(evaluator: Any) -> Any:
    """What `inference_on_dataset` takes, of what LiBai's takes: one evaluator, a list of them, or None."""
    if isinstance(evaluator, abc.MutableSequence):
        return [own_evaluators(each) for each in evaluator]
    return evaluator if evaluator is None or isinstance(evaluator, DatasetEvaluator) else LiBaiEvaluator(evaluator)
