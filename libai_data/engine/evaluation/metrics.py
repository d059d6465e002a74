"""Metrics: mean loss and perplexity over what counts, and accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from libai_data.engine.evaluation.evaluator import DatasetEvaluator
from libai_data.errors import SchemaError
from libai_data.errors.argument_rules import Rule, check, each, whole
from libai_data.mesh.current import is_main_process

_LOSSES = "losses of MeanLossEvaluator"
_LARGEST_EXPONENT = 700.0  # above it, exp(mean) overflows float64


class MeanLossEvaluator(DatasetEvaluator):
    """Mean cross-entropy of all samples, or of all tokens: "loss".

    This is the mean of the losses of samples or tokens, and not of batches, because batches have different numbers of
    tokens that count. The ranks with the scores compute the losses; the scores are not sent.

    Args:
        scores_name: the model's output [samples, ..., classes], before softmax.
        labels_name: the input [samples, ...]; labels below 0 do not count.
        losses_name: an output [samples, ...] of losses, used instead of the scores. If the model has the input of
            labels, losses of labels below 0 do not count.
        mask_name: an input [samples, ...], 0 where a label does not count; not every model has one.
    """

    def __init__(
        self,
        scores_name: str = "prediction_scores",
        labels_name: str = "labels",
        losses_name: str | None = None,
        mask_name: str = "loss_mask",
    ) -> None:
        self.input_fields = (labels_name, mask_name)
        self._mask_name = mask_name
        self._scores_name = scores_name
        self._labels_name = labels_name
        self._losses_name = losses_name
        self._classes = 0
        self.reset()

    def reset(self) -> None:
        self._sum = 0.0
        self._count = 0

    def prepare(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> dict[str, Any]:
        """The loss of each sample or token, a tensor on the ranks with the scores."""
        import oneflow as flow

        name = self._losses_name or self._scores_name
        if name not in outputs:
            raise SchemaError(
                f"the model returned {sorted(outputs)}, but the mean loss needs '{name}'; set scores_name, or "
                "losses_name for a model that returns a loss for each sample"
            )
        if self._losses_name is not None:
            return {_LOSSES: outputs[name]}
        if self._labels_name not in inputs:
            raise SchemaError(f"the batch has {sorted(inputs.keys())}, but the mean loss needs '{self._labels_name}'")
        scores, labels = outputs[name], inputs[self._labels_name]
        if tuple(scores.shape[:-1]) != tuple(labels.shape):
            raise SchemaError(
                f"'{name}' has shape {tuple(scores.shape)} and '{self._labels_name}' {tuple(labels.shape)}; scores "
                "must have one dim more, the classes, at the end"
            )
        self._classes = int(scores.shape[-1])
        if labels.is_global and labels.placement != scores.placement:
            labels = labels.to_global(placement=scores.placement)
        if labels.is_floating_point():
            raise _no_class_numbers(self._labels_name, labels.dtype, "the mean loss")
        # OneFlow's cross entropy refuses smaller integers.
        losses = flow._C.sparse_softmax_cross_entropy(
            scores.reshape(-1, self._classes), labels.to(flow.int64).reshape(-1).clamp(min=0, max=self._classes - 1)
        )
        return {_LOSSES: losses.reshape(*labels.shape)}

    def process(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        losses = np.asarray(outputs[_LOSSES].numpy(), dtype=np.float64)
        if losses.ndim == 0:
            raise SchemaError(
                f"'{self._losses_name}' is one number for the whole batch, padding included; return a loss for each "
                "sample"
            )
        counts = np.ones(losses.shape, dtype=bool)
        if self._mask_name in inputs:
            counts &= self._of_losses(inputs, self._mask_name, losses) != 0
        if self._labels_name in inputs:
            labels = self._of_losses(inputs, self._labels_name, losses)
            counts &= labels >= 0
            if self._losses_name is None and (labels[counts] >= self._classes).any():
                raise SchemaError(
                    f"'{self._labels_name}' has the value {labels[counts].max()}, but '{self._scores_name}' has "
                    f"{self._classes} classes, 0 to {self._classes - 1}; labels that do not count must be below 0"
                )
        losses = losses[counts]
        self._sum += float(losses.sum())
        self._count += losses.size

    def _of_losses(self, inputs: dict[str, Any], name: str, losses: np.ndarray) -> np.ndarray:
        """An input with a number for each loss; numbers that all samples share may have the shape [1, ...]."""
        array = np.asarray(inputs[name].numpy())
        if array.ndim != losses.ndim or any(size not in (1, wanted) for size, wanted in zip(array.shape, losses.shape)):
            raise SchemaError(
                f"'{name}' has the shape {list(array.shape)}, but the losses {list(losses.shape)}; it says which "
                "losses count, so give it the same shape, or set labels_name or mask_name of the evaluator"
            )
        return np.broadcast_to(array, losses.shape)

    def evaluate(self) -> dict[str, float]:
        return {"loss": self._mean()} if is_main_process() else {}

    def _mean(self) -> float:
        if self._count == 0:
            raise SchemaError("nothing was evaluated: the test loader gave no label that counts")
        return self._sum / self._count


class PerplexityEvaluator(MeanLossEvaluator):
    """Perplexity of a language model, e to the mean loss of all tokens, and that mean: "perplexity" and "loss"."""

    def evaluate(self) -> dict[str, float]:
        if not is_main_process():
            return {}
        mean = self._mean()
        return {"perplexity": math.inf if mean >= _LARGEST_EXPONENT else math.exp(mean), "loss": mean}


def _no_class_numbers(name: str, dtype: Any, metric: str) -> SchemaError:
    return SchemaError(f"'{name}' is {dtype}, but {metric} needs the numbers of classes, as integers or bools")


def correct_in_top_k(scores: np.ndarray, labels: np.ndarray, k: int) -> int:
    """Count the samples whose label [samples] is among the k classes with the highest scores [samples, classes].

    If scores are equal, the lower class number comes first.
    """
    # Classes that rank before the label: those with a higher score, or with the same and a lower number.
    own = np.take_along_axis(scores, labels[:, None], axis=1)
    before = (scores > own).sum(axis=1) + ((scores == own) & (np.arange(scores.shape[1]) < labels[:, None])).sum(axis=1)
    # A label whose score is NaN or infinite is never correct.
    return int(((before < k) & np.isfinite(own[:, 0])).sum())


_EACH = each(whole(1), least=1)
_RULES = {
    "topk": Rule(f"{_EACH.allowed}, and given once", lambda ks: _EACH.accepts(ks) and len({*ks}) == len(ks)),
}


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
        check(_RULES, topk=topk)
        self.topk = tuple(topk)
        self.input_fields = (labels_name,)
        self._scores_name = scores_name
        self._labels_name = labels_name
        self.reset()

    def reset(self) -> None:
        self._samples = 0
        self._correct = dict.fromkeys(self.topk, 0)

    def process(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        if self._scores_name not in outputs:
            raise SchemaError(
                f"the model returned {sorted(outputs)}, but top-k accuracy needs '{self._scores_name}' [samples, "
                "classes]; set scores_name of ClsEvaluator"
            )
        if self._labels_name not in inputs:
            raise SchemaError(
                f"the model's inputs have no '{self._labels_name}', but top-k accuracy needs '{self._labels_name}' "
                "[samples]; let get_batch return it, or set labels_name of ClsEvaluator"
            )
        scores = np.asarray(outputs[self._scores_name].numpy())
        labels = np.asarray(inputs[self._labels_name].numpy())
        if scores.ndim != 2 or labels.size != len(scores):
            raise SchemaError(
                f"top-k accuracy needs '{self._scores_name}' [samples, classes] and '{self._labels_name}' [samples]; "
                f"their shapes are {list(scores.shape)} and {list(labels.shape)}. For tokens, use PerplexityEvaluator"
            )
        if labels.dtype.kind not in "biu":
            raise _no_class_numbers(self._labels_name, labels.dtype, "top-k accuracy")
        labels = labels.reshape(-1).astype(np.int64)
        if labels.size and not 0 <= labels.min() <= labels.max() < scores.shape[1]:
            raise SchemaError(
                f"'{self._labels_name}' has values from {labels.min()} to {labels.max()}, but '{self._scores_name}' "
                f"has {scores.shape[1]} classes, 0 to {scores.shape[1] - 1}"
            )
        self._samples += len(labels)
        for k in self.topk:
            self._correct[k] += correct_in_top_k(scores, labels, k)

    def evaluate(self) -> dict[str, float]:
        if not is_main_process():
            return {}
        if self._samples == 0:
            raise SchemaError("nothing was evaluated: the test loader gave no sample that counts")
        return {f"Acc@{k}": 100.0 * self._correct[k] / self._samples for k in self.topk}
