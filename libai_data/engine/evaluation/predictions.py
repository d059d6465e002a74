"""What a model returns for each sample of a loader."""

from __future__ import annotations

from typing import Any

import numpy as np

from libai_data.data.nesting import Leaf, put_together, taken_apart
from libai_data.engine.evaluation.evaluator import DatasetEvaluator
from libai_data.errors import SchemaError


class Predictions(DatasetEvaluator):
    """Collects what a model returns, on rank 0.

    The result has the outputs of the model, nested as the model nests them: arrays [samples, ...] in the order of the
    loader, or [batches] for an output that is one number for a batch.
    """

    input_fields = ()

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._batches: list[dict[str, np.ndarray]] = []
        self._skeleton: dict[str, Any] = {}

    def process(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        leaves: dict[str, Any] = {}
        self._skeleton = taken_apart(outputs, leaves)
        arrays = {path: leaf.numpy() for path, leaf in leaves.items() if leaf is not None}
        rows = {path: len(array) for path, array in arrays.items() if array.ndim}
        if len({*rows.values()}) > 1:
            raise SchemaError(
                f"the model's outputs have {rows} rows in a batch, but predictions need a row for each sample; return "
                "no output that samples share, at least in eval mode"
            )
        first = self._batches[0] if self._batches else arrays
        for path in first.keys() | arrays.keys():
            before, now = _row_shape(first.get(path)), _row_shape(arrays.get(path))
            if before != now:
                raise SchemaError(
                    f"a row of the model's output '{path}' is {before} in the first batch, but {now} in batch "
                    f"{len(self._batches)}; pad the rows of all batches to one shape"
                )
        self._batches.append(arrays)

    def evaluate(self) -> dict[str, Any]:
        joined: dict[str, Any] = put_together(self._skeleton, self._joined)
        return joined

    def _joined(self, leaf: Leaf) -> np.ndarray | None:
        arrays = [batch[leaf.path] for batch in self._batches if leaf.path in batch]
        return np.concatenate([np.atleast_1d(array) for array in arrays]) if arrays else None


def _row_shape(array: np.ndarray | None) -> str:
    if array is None:
        return "missing"
    return f"{array.dtype} {list(array.shape[1:])}" if array.ndim else "one number for all samples"
