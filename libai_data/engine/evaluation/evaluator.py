"""What an evaluator is."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Dict, Optional, Sequence


class DatasetEvaluator:
    """Takes inputs and outputs of a model batch by batch, and sums them up in the end.

    Attributes:
        input_fields: inputs that `process` wants to see; None for all. What it does not name need not travel to rank 0.
    """

    input_fields: Optional[Sequence[str]] = None

    def reset(self) -> None:
        """Begin a new round."""

    def process(self, inputs: Dict[str, Any], outputs: Dict[str, Any]) -> None:
        """Take one batch. Called on rank 0.

        Args:
            inputs: field -> local CPU tensor [samples that count, ...].
            outputs: output of the model -> local CPU tensor; those with the batch's rows have as many rows as `inputs`,
                in the same order, others are as the model returned them.
        """

    def evaluate(self) -> Optional[Dict[str, Any]]:
        """Sum up. Called on every rank; rank 0's answer counts.

        Returns:
            Metric -> number, or a dict of such dicts.
        """


class DatasetEvaluators(DatasetEvaluator):
    """Several evaluators as one.

    Args:
        evaluators: their metrics must have different names.
    """

    def __init__(self, evaluators: Sequence[DatasetEvaluator]) -> None:
        self._evaluators = list(evaluators)
        fields = [getattr(evaluator, "input_fields", None) for evaluator in self._evaluators]
        if all(each is not None for each in fields):
            self.input_fields = sorted({name for each in fields for name in each or ()})

    def reset(self) -> None:
        """Begin a new round with each."""
        for evaluator in self._evaluators:
            evaluator.reset()

    def process(self, inputs: Dict[str, Any], outputs: Dict[str, Any]) -> None:
        """Give the batch to each."""
        for evaluator in self._evaluators:
            evaluator.process(inputs, outputs)

    def evaluate(self) -> Dict[str, Any]:
        """All metrics.

        Raises:
            ValueError: Two evaluators use the same name.
        """
        results: Dict[str, Any] = OrderedDict()
        for evaluator in self._evaluators:
            for name, value in (evaluator.evaluate() or {}).items():
                if name in results:
                    raise ValueError(f"two evaluators return a metric '{name}'; rename one of them")
                results[name] = value
        return results
