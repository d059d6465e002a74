"""Evaluations of odd models and loaders leave the model as it was, and never count nothing or without end."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import oneflow as flow
import pytest

from libai_data import DataLoader
from libai_data.delivery import to_global
from libai_data.engine import DefaultTrainer, default_setup
from libai_data.engine.evaluation import ClsEvaluator, MeanLossEvaluator, inference_context, inference_on_dataset
from libai_data.engine.events import EventStorage
from libai_data.engine.hooks import EvalHook
from libai_data.errors import ConfigError, SchemaError
from tests.engine.test_evaluation import Collecting
from tests.engine.tiny import TinyDataset, TinyModel, on_one_rank, tiny_config


def test_parts_of_a_model_return_to_their_own_modes(model: TinyModel) -> None:
    model.train()
    model.first.eval()  # as a BatchNorm that is frozen
    with inference_context(model):
        assert not any(module.training for module in model.modules())
    assert (model.training, model.first.training, model.second.training) == (True, False, True)


def test_a_model_whose_train_does_more_is_told_the_end_of_an_evaluation() -> None:
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


def evaluated(model: TinyModel, loader: Any, eval_iter: float = float("inf"), evaluator: Any = None) -> Any:
    return inference_on_dataset(model, loader, 4, eval_iter, to_global, "cpu", evaluator or Collecting())


def test_a_loader_without_a_batch_is_no_evaluation(model: TinyModel) -> None:
    batches = iter([{"points": np.ones((4, 6), np.float32)}])
    assert evaluated(model, batches) == {"batches": 1}
    loaders: list[Any] = [batches, []]
    for empty in loaders:
        with pytest.raises(ConfigError, match=r"test loader \(list.*\) yields no batch; is its dataset empty"):
            evaluated(model, empty)


@pytest.mark.parametrize("eval_iter", [float("inf"), 100_000])
def test_a_test_loader_without_an_end_is_refused_unless_the_batches_are_limited(
    model: TinyModel, eval_iter: float
) -> None:
    loader = DataLoader(TinyDataset(8), 4, ends="cycle")
    with pytest.raises(ConfigError, match=r"test loader \(\w+\) is an endless stream"):
        evaluated(model, loader, eval_iter)
    assert evaluated(model, loader, 3) == {"batches": 3}
    assert loader.state_dict()["position"] == 12  # The next evaluation loses no batch.


def test_a_train_loader_that_is_a_test_loader_too_is_refused(tmp_path: Path) -> None:
    class Shares(DefaultTrainer):
        @classmethod
        def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
            loader = DataLoader(TinyDataset(8), 4)
            return loader, loader, None

    cfg = tiny_config(str(tmp_path), global_batch_size=4)
    default_setup(cfg)
    with pytest.raises(ConfigError, match=r"train loader \(\w+\) is a test loader too, .* build a second loader"):
        Shares(cfg)


def test_labels_that_get_batch_does_not_return_are_named(model: TinyModel) -> None:
    loader = [{"points": np.ones((4, 6), np.float32)}]
    with pytest.raises(SchemaError, match=r"the model's inputs have no 'labels', but top-k accuracy needs 'labels'"):
        evaluated(model, loader, evaluator=ClsEvaluator((1,)))


def test_labels_that_the_model_has_no_class_for_are_refused_unless_a_mask_leaves_them_out(model: TinyModel) -> None:
    dataset = TinyDataset(4)
    batch = {"points": dataset.points, "labels": np.array([0, 255, 1, -1])}

    class Unlabelled(TinyModel):
        def forward(self, points: Any, labels: Any = None, loss_mask: Any = None) -> dict[str, Any]:
            return super().forward(points)

    unlabelled = on_one_rank(Unlabelled())
    with pytest.raises(SchemaError, match="'labels' has the value 255, but 'prediction_scores' has 3 classes, 0 to 2"):
        evaluated(unlabelled, [batch], evaluator=MeanLossEvaluator())
    masked = {**batch, "loss_mask": np.array([1, 0, 1, 1])}
    without = {"points": dataset.points[[0, 2]], "labels": np.array([0, 1])}
    found, expected = (evaluated(unlabelled, [each], evaluator=MeanLossEvaluator()) for each in (masked, without))
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def hook_of(results: Any) -> EvalHook:
    hook = EvalHook(1, lambda: results)
    hook.trainer = SimpleNamespace(storage=EventStorage(), iter=5)
    hook.trainer.storage.put_scalar("lr", 0.1)
    return hook


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ({"a/b": 1, "a": {"b": 2}}, "the evaluation returned two results 'a/b'; rename one of them"),
        ({1: 1, "1": 2}, "the evaluation returned two results '1'; rename one of them"),
        ({"loss": 1, "val_loss": 2}, "has two results that are logged as 'val_loss'; rename one of them"),
    ],
)
def test_two_results_of_one_name_are_refused(results: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        hook_of(results).after_train()


def test_a_result_with_the_name_of_another_number_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    hook = hook_of({"lr": 1, "Acc@1": 2})
    hook.after_train()
    assert "with the names of other numbers of the training: ['lr']. Rename them" in caplog.text
    caplog.clear()
    hook = hook_of({"Acc@1": 2})
    hook.after_train()
    hook.after_train()
    assert not caplog.records


class Returning(Collecting):
    def __init__(self, results: Any) -> None:
        super().__init__()
        self.results = results

    def evaluate(self) -> Any:
        return self.results


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("results", "message"),
    [
        ({"a": {"b": 1, "score": lambda: 1}}, "'a/score', a function, which cannot be sent to the other ranks"),
        (defaultdict(lambda: 0, a=1), "a defaultdict, which cannot be sent .* return a plain dict of numbers"),
        ([0.5], "a list; return a dict of numbers"),
    ],
)
def test_results_that_cannot_be_sent_to_the_other_ranks_name_evaluator_and_key(
    model: TinyModel, results: Any, message: str, several: bool
) -> None:
    evaluator: Any = [Collecting(), Returning(results)] if several else Returning(results)
    with pytest.raises(SchemaError, match=f"evaluate of Returning returned {message}"):
        evaluated(model, [{"points": np.ones((4, 6), np.float32)}], evaluator=evaluator)


def test_a_global_tensor_is_no_result(model: TinyModel) -> None:
    tensor = flow.ones(1).to_global(flow.placement("cpu", [0]), [flow.sbp.broadcast])
    with pytest.raises(SchemaError, match=r"returned 'a', a Tensor, .*global tensor"):
        evaluated(model, [{"points": np.ones((4, 6), np.float32)}], evaluator=Returning({"a": tensor}))
