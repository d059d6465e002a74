"""Predictions: what a model returns for each sample, nested as the model nests it."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import oneflow as flow
import pytest

from libai_data import DataLoader
from libai_data.delivery import to_global
from libai_data.engine.evaluation import inference_on_dataset
from libai_data.engine.evaluation.predictions import Predictions
from libai_data.errors import SchemaError
from tests.engine.tiny import TinyDataset


def predicted(outputs: Any, samples: int = 7) -> dict[str, Any]:
    """Predict by a function of the points [4, 6] and the number of the batch."""
    loader = DataLoader(TinyDataset(samples), 4, ends="pad")
    batches = count()

    def model(points: Any, labels: Any) -> Any:
        return outputs(points, next(batches))

    return inference_on_dataset(model, loader, 4, 1e5, to_global, "cpu", Predictions())


def test_outputs_are_joined_as_the_model_nests_them() -> None:
    found = predicted(
        lambda points, _: {
            "a": points,
            "b": {"c": (points.sum(dim=1), points * 2)},
            "loss": points.sum() * 0,
            "no": None,
        }
    )
    points = TinyDataset(7).points
    assert list(found) == ["a", "b", "loss"]
    np.testing.assert_array_equal(found["a"], points)
    assert isinstance(found["b"]["c"], tuple)
    np.testing.assert_allclose(found["b"]["c"][0], points.sum(axis=1), rtol=1e-5)
    np.testing.assert_array_equal(found["b"]["c"][1], points * 2)
    np.testing.assert_array_equal(found["loss"], [0, 0])


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (
            lambda points, _: {"a": points, "table": flow.zeros(9, 2)},
            r"the model's outputs have \{'a': 4, 'table': 9\} rows",
        ),
        (
            lambda points, batch: {"a": [points[:, batch:]]},
            r"output 'a\.0' is .* \[6\] in the first batch, but .* \[5\] in batch 1",
        ),
        (
            lambda points, batch: {"a": points, "b": points if batch else None},
            "output 'b' is missing in the first batch",
        ),
    ],
)
def test_outputs_that_cannot_be_joined_are_named(outputs: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        predicted(outputs)
