"""Top-k accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from libai_data.engine.evaluation.evaluator import DatasetEvaluator
from libai_data.errors import ConfigError, SchemaError
from libai_data.mesh.current import is_main_process


def correct_in_top_k(scores: np.ndarray, labels: np.ndarray, k: int) -> int:
    """Count the samples whose label [samples] is among the k classes with the highest scores [samples, classes].

    Of equal scores, the lower class number comes first.
    """
    # Classes that rank before the label: those with a higher score, or with the same and a lower number.
    own = np.take_along_axis(scores, labels[:, None], axis=1)
    before = (scores > own).sum(axis=1) + ((scores == own) & (np.arange(scores.shape[1]) < labels[:, None])).sum(axis=1)
    # A score that is no number is never right.
    return int(((before < k) & np.isfinite(own[:, 0])).sum())


class ClsEvaluator(DatasetEvaluator):
    """Accuracy of a classifier, in percent: "Acc@k" for each k.

    Args:
        topk: values of k.
        scores_name: name of the model's output [samples, classes].
        labels_name: name of the input [samples].
    """

    def __init__(
        self,
        topk: Sequence[int] = (1, 5),
        scores_name: str = "prediction_scores",
        labels_name: str = "labels",
    ) -> None:
        if not topk or any(k < 1 for k in topk):
            raise ConfigError(f"topk is {list(topk)}; it takes numbers of classes of at least 1, such as (1, 5)")
        self.topk = tuple(topk)
        self.input_fields = (labels_name,)
        self._scores_name = scores_name
        self._labels_name = labels_name
        self.reset()

    def reset(self) -> None:
        """Begin a new round."""
        self._samples = 0
        self._correct = dict.fromkeys(self.topk, 0)

    def process(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        """Count one batch."""
        if self._scores_name not in outputs:
            raise SchemaError(
                f"the model returned {sorted(outputs)}, but top-k accuracy needs '{self._scores_name}' [samples, "
                "classes]; set scores_name of ClsEvaluator"
            )
        scores = np.asarray(outputs[self._scores_name].numpy())
        labels = np.asarray(inputs[self._labels_name].numpy()).reshape(-1)
        self._samples += len(labels)
        for k in self.topk:
            self._correct[k] += correct_in_top_k(scores, labels, k)

    def evaluate(self) -> dict[str, float]:
        """Accuracies on rank 0, {} elsewhere."""
        if not is_main_process():
            return {}
        if self._samples == 0:
            raise SchemaError("nothing was evaluated: the test loader gave no sample that counts")
        return {f"Acc@{k}": 100.0 * self._correct[k] / self._samples for k in self.topk}
