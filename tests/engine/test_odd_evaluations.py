"""Evaluations of odd models and loaders leave the model as it was, and never count nothing or without end."""

from __future__ import annotations

from typing import Any

import numpy as np
import oneflow as flow
import pytest

from libai_data import DataLoader
from libai_data.delivery import to_global
from libai_data.engine.evaluation import ClsEvaluator, MeanLossEvaluator, inference_context, inference_on_dataset
from libai_data.errors import ConfigError, SchemaError
from tests.engine.test_evaluation import Collecting
from tests.engine.tiny import TinyDataset, TinyModel


@pytest.fixture()
def model() -> TinyModel:
    model = TinyModel()
    model.to_global(flow.placement("cpu", [0]), [flow.sbp.broadcast])
    return model


def test_parts_of_a_model_return_to_their_own_modes(model: TinyModel) -> None:
    model.train()
    model.first.eval()  # as a BatchNorm that is frozen
    with inference_context(model):
        assert not any(module.training for module in model.modules())
    assert (model.training, model.first.training, model.second.training) == (True, False, True)


def test_a_model_whose_train_does_more_is_told_the_end_of_an_evaluation(model: TinyModel) -> None:
    told: list[bool] = []

    class Merging(TinyModel):
        def train(self, mode: bool = True) -> Any:
            told.append(mode)
            return super().train(mode)

    merging = Merging()
    told.clear()
    with inference_context(merging):
        pass
    assert told == [False, True]
