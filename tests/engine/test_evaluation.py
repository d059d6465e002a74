from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import oneflow as flow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oneflow import nn

from libai_data import from_iterable
from libai_data.delivery import to_global
from libai_data.delivery.build import build_image_test_loader
from libai_data.engine.evaluation import (
    ClsEvaluator,
    DatasetEvaluator,
    DatasetEvaluators,
    MeanLossEvaluator,
    PerplexityEvaluator,
    flatten_results_dict,
    inference,
    inference_on_dataset,
    print_csv_format,
)
from libai_data.engine.evaluation.metrics import correct_in_top_k
from libai_data.errors import ConfigError, SchemaError
from libai_data.structures import DistTensorData
from tests.engine.tiny import TinyDataset, TinyModel


@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 8), st.integers(0, 1000))
def test_top_k_counts_what_sorting_the_scores_says(samples: int, classes: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 4, (samples, classes)).astype(np.float32)  # with many equal scores
    labels = rng.integers(0, classes, samples)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    assert correct_in_top_k(scores, labels, k) == int((best == labels[:, None]).any(axis=1).sum())


def test_a_model_that_answers_nan_is_never_right() -> None:
    scores = np.full((4, 3), np.nan, np.float32)
    assert correct_in_top_k(scores, np.array([0, 1, 2, 0]), 3) == 0


class Collecting(DatasetEvaluator):
    """Keeps everything it sees."""

    def __init__(self) -> None:
        self.inputs: list[dict[str, np.ndarray]] = []
        self.outputs: list[dict[str, np.ndarray]] = []

    def process(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        self.inputs.append({name: value.numpy().copy() for name, value in inputs.items()})
        self.outputs.append({name: value.numpy().copy() for name, value in outputs.items()})

    def evaluate(self) -> dict[str, float]:
        return {"batches": float(len(self.inputs))}


def scores_of(model: TinyModel, points: np.ndarray) -> np.ndarray:
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    hidden = np.maximum(points @ weights["first.weight"].T + weights["first.bias"], 0)
    return hidden @ weights["second.weight"].T + weights["second.bias"]


@pytest.mark.parametrize(("length", "batch"), [(21, 4), (20, 4), (3, 8), (1, 1)])
def test_each_sample_counts_once_with_its_own_output(model: TinyModel, length: int, batch: int) -> None:
    dataset = TinyDataset(length)
    loader = build_image_test_loader(dataset, batch, num_workers=0)
    seen, accuracy = Collecting(), ClsEvaluator((1, 2))
    model.train()
    results = inference_on_dataset(model, loader, batch, 1e5, to_global, "cpu", [seen, accuracy])
    assert model.training
    points = np.concatenate([inputs["points"] for inputs in seen.inputs])
    scores = np.concatenate([outputs["prediction_scores"] for outputs in seen.outputs])
    assert sorted(map(tuple, points)) == sorted(map(tuple, dataset.points))
    np.testing.assert_allclose(scores, scores_of(model, points), atol=1e-5)
    expected = scores_of(model, dataset.points)
    for k in (1, 2):
        assert results[f"Acc@{k}"] == pytest.approx(100 * correct_in_top_k(expected, dataset.labels, k) / length)


class SharesAMask(nn.Module):
    """Ignores its mask, which all samples share."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, mask: Any, points: Any, labels: Any) -> Any:
        return self.model(points, labels)


@pytest.mark.parametrize("mask_rows", [1, 2, 5])
@pytest.mark.parametrize("length", [13, 12])
def test_a_first_field_that_all_samples_share_does_not_decide_how_many_there_are(
    model: TinyModel, length: int, mask_rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    def collate(samples: list[Any]) -> Any:
        rows = {name: np.stack([each.get(name).tensor for each in samples]) for name in ("points", "labels")}
        return {"mask": np.ones((mask_rows, 4), np.float32), **rows}

    dataset = TinyDataset(length)
    loader = build_image_test_loader(dataset, 4, num_workers=0, collate_fn=collate)
    seen = Collecting()
    with caplog.at_level("INFO"):
        inference_on_dataset(SharesAMask(model), loader, 4, 1e5, to_global, "cpu", [seen, ClsEvaluator((1,))])
    assert sorted(map(tuple, np.concatenate([each["points"] for each in seen.inputs]))) == sorted(
        map(tuple, dataset.points)
    )
    assert sum(len(each["prediction_scores"]) for each in seen.outputs) == length
    assert {each["mask"].shape for each in seen.inputs} == {(mask_rows, 4)}
    assert f"Evaluated {length} samples" in caplog.text


@pytest.mark.parametrize("mask_rows", [0, 1])
def test_a_collator_that_leaves_rows_out_decides_how_many_there_are(
    model: TinyModel, mask_rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    def collate(samples: list[Any]) -> Any:
        kept = [each for each in samples if int(each.get("labels").tensor) != 1]
        batch = {name: np.stack([each.get(name).tensor for each in kept]) for name in ("points", "labels")}
        return {"mask": np.ones((mask_rows, 4), np.float32), **batch} if mask_rows else batch

    dataset = TinyDataset(16)
    labels = dataset.labels
    loader = build_image_test_loader(dataset, 4, num_workers=0, collate_fn=collate)
    seen = Collecting()
    tested = SharesAMask(model) if mask_rows else model
    with caplog.at_level("INFO"):
        inference_on_dataset(tested, loader, 4, 1e5, to_global, "cpu", [seen, ClsEvaluator((1,))])
    assert 0 < (labels != 1).sum() < 16
    assert sum(len(each["prediction_scores"]) for each in seen.outputs) == (labels != 1).sum()
    assert f"Evaluated {(labels != 1).sum()} samples" in caplog.text


class HasATable(nn.Module):
    """Returns a table that all samples share, and the same number for each sample."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        scores = self.model(inputs["points"])["prediction_scores"]
        table = flow.arange(8, dtype=flow.float32, placement=scores.placement, sbp=scores.sbp).reshape(4, 2)
        return {"prediction_scores": scores, "table": table, "alike": scores[:, :1] * 0}


@pytest.mark.parametrize("length", [13, 15])
@pytest.mark.parametrize("ends", ["pad", "short"])
def test_a_table_with_as_many_rows_as_a_padded_batch_is_whole(
    model: TinyModel, length: int, ends: str, caplog: pytest.LogCaptureFixture
) -> None:
    def get_batch(batch: Any) -> dict[str, Any]:
        inputs = to_global(batch)
        return {**inputs, "prior": flow.eye(4, placement=flow.placement("cpu", [0]), sbp=flow.sbp.broadcast)}

    loader = from_iterable(TinyDataset(length), 4, ends=ends)
    seen = Collecting()
    inference_on_dataset(HasATable(model), loader, 4, 1e5, get_batch, "cpu", seen)
    assert {each["prior"].shape for each in seen.inputs} == {(4, 4)}
    assert {each["table"].shape for each in seen.outputs} == {(4, 2)}
    for name in ("prediction_scores", "alike"):
        assert sum(len(each[name]) for each in seen.outputs) == length
    assert not caplog.records


def test_a_warning_names_what_may_be_a_table_in_the_only_batch(
    model: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    loader = build_image_test_loader(TinyDataset(3), 4, num_workers=0)
    inference_on_dataset(HasATable(model), loader, 4, 1e5, to_global, "cpu", Collecting())
    assert caplog.text.count("as many rows as the batch (4), of which 3 count") == 1
    assert "'table' has" in caplog.text


def test_padding_that_cannot_be_told_apart_is_refused_also_if_a_collator_left_samples_out(model: TinyModel) -> None:
    def flat(batch: Any) -> dict[str, Any]:
        return {name: value.reshape(1, *value.shape) for name, value in to_global(batch).items()}

    loader = build_image_test_loader(TinyDataset(5), 4, num_workers=0)
    with pytest.raises(SchemaError, match=r"1 of the batch's 4 rows count.*none of the inputs has 4 rows.*\(1, 4"):
        inference_on_dataset(lambda **inputs: {"x": inputs["points"]}, loader, 4, 1e5, flat, "cpu", Collecting())

    def collate(samples: list[Any]) -> Any:
        kept = samples if len({each.get("labels").tensor.item() for each in samples}) == 1 else samples[:2]
        return {name: np.stack([each.get(name).tensor for each in kept]) for name in ("points", "labels")}

    loader = build_image_test_loader(TinyDataset(5), 4, num_workers=0, collate_fn=collate)
    with pytest.raises(SchemaError, match=r"1 of the batch's 4 rows count.*4 rows in an earlier batch"):
        inference_on_dataset(model, loader, 4, 1e5, to_global, "cpu", Collecting())


def test_eval_iter_limits_the_batches(model: TinyModel) -> None:
    loader = build_image_test_loader(TinyDataset(21), 4, num_workers=0)
    assert inference_on_dataset(model, loader, 4, 2, to_global, "cpu", Collecting()) == {"batches": 2.0}


def test_eval_iter_limits_the_samples_to_those_of_one_rank(
    model: TinyModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on four data-parallel ranks of two rows: three batches of one rank end within the first global batch."""
    monkeypatch.setattr(inference, "get_data_parallel_size", lambda: 4)
    dataset = TinyDataset(21)
    table = np.arange(16, dtype=np.float32).reshape(8, 2)

    def get_batch(data: Any) -> dict[str, Any]:
        return {**to_global(data), "table": to_global({"table": DistTensorData(table, ["broadcast"] * 2)})["table"]}

    def forward(**inputs: Any) -> dict[str, Any]:
        return {"scores": inputs["points"]}

    whole: Any = None
    for eval_iter, batches in ((100_000, [8, 8, 5]), (3, [6]), (6, [8, 4]), (8, [8, 8])):
        loader = build_image_test_loader(dataset, 8, num_workers=0)
        seen = Collecting()
        inference_on_dataset(forward, loader, 8, eval_iter, get_batch, "cpu", seen)
        assert [len(outputs["scores"]) for outputs in seen.outputs] == batches
        scores = np.concatenate([each["scores"] for each in seen.outputs])
        whole = scores if whole is None else whole
        assert np.array_equal(scores, whole[: len(scores)])
        assert [len(each["table"]) for each in seen.inputs[1:]] == [8] * (len(batches) - 1)
    assert "has as many rows as the batch" not in caplog.text


def test_batches_of_any_origin_count_whole(model: TinyModel) -> None:
    dataset = TinyDataset(6)
    batches = [(dataset.points[:4], dataset.labels[:4]), (dataset.points[4:], dataset.labels[4:])]

    def get_batch(data: Any) -> dict[str, Any]:
        return to_global({"points": data[0], "labels": data[1]})

    seen = Collecting()
    inference_on_dataset(model, batches, 4, 1e5, get_batch, "cpu", seen)
    assert [len(outputs["prediction_scores"]) for outputs in seen.outputs] == [4, 2]


def test_inputs_that_no_evaluator_wants_do_not_travel(model: TinyModel) -> None:
    class LabelsAlone(Collecting):
        input_fields = ("labels",)

    loader = build_image_test_loader(TinyDataset(4), 4, num_workers=0)
    seen = LabelsAlone()
    inference_on_dataset(model, loader, 4, 1e5, to_global, "cpu", seen)
    assert [sorted(inputs) for inputs in seen.inputs] == [["labels"]]
    both = DatasetEvaluators([seen, ClsEvaluator()])
    assert both.input_fields == ["labels"]
    assert DatasetEvaluators([seen, Collecting()]).input_fields is None


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        ((4, 5), np.zeros((4, 8), np.int64), r"shapes are \[4, 5\] and \[4, 8\].*PerplexityEvaluator"),
        ((4, 8, 5), np.zeros((4, 8), np.int64), r"shapes are \[4, 8, 5\] and \[4, 8\]"),
        ((4, 5), np.full(4, 5), "'labels' has values from 5 to 5, but 'prediction_scores' has 5 classes, 0 to 4"),
        ((4, 5), np.array([0, -1, 2, 3]), "'labels' has values from -1 to 3"),
        ((4, 5), np.array([0.5, 1, 2, 3]), "'labels' is float64, but top-k accuracy needs the numbers of classes"),
    ],
)
def test_scores_and_labels_that_do_not_fit_are_refused_by_name(scores: Any, labels: Any, message: str) -> None:
    evaluator = ClsEvaluator(topk=(1,))
    with pytest.raises(SchemaError, match=message):
        evaluator.process({"labels": flow.tensor(labels)}, {"prediction_scores": flow.zeros(*scores)})


@pytest.mark.parametrize("topk", [(0,), (1, 1)])
def test_top_0_and_a_number_that_is_given_twice_are_refused(topk: Any) -> None:
    with pytest.raises(ConfigError, match="topk"):
        ClsEvaluator(topk)


def test_labels_of_two_classes_may_be_bools() -> None:
    evaluator = ClsEvaluator((1,))
    scores = flow.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
    evaluator.process({"labels": flow.tensor([False, True, True])}, {"prediction_scores": scores})
    assert evaluator.evaluate() == {"Acc@1": pytest.approx(200 / 3)}


def test_labels_of_a_mean_loss_that_are_no_integers_are_named() -> None:
    with pytest.raises(SchemaError, match=r"'labels' is .*float32, but the mean loss needs the numbers of classes"):
        MeanLossEvaluator().prepare({"labels": flow.zeros(4)}, {"prediction_scores": flow.zeros(4, 3)})


def test_nested_results_get_flat_names() -> None:
    assert flatten_results_dict({"a": {"b": {"c": 1}, "d": 2}, "e": 3}) == {"a/b/c": 1, "a/d": 2, "e": 3}
    by_number: dict[Any, Any] = {"Acc": {1: 50.0}, 5: 90.0}
    assert flatten_results_dict(by_number) == {"Acc/1": 50.0, "5": 90.0}


def test_numbers_of_any_kind_are_shown(caplog: pytest.LogCaptureFixture) -> None:
    results: dict[Any, Any] = {1: 1, "a": np.float32(0.5), "b": np.array(0.25)}
    results.update(c=flow.tensor(0.125), d=Fraction(1, 16))
    with caplog.at_level("INFO", "libai_data"):
        print_csv_format(results, "digits")
    assert "1,a,b,c,d" in caplog.text and "1.0000,0.5000,0.2500,0.1250,0.0625" in caplog.text


class WithLosses(nn.Module):
    """Returns each sample's own loss."""

    def __init__(self, model: TinyModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, points: Any, labels: Any) -> dict[str, Any]:
        scores = self.model(points)["prediction_scores"]
        return {"prediction_scores": scores, "each_loss": flow._C.sparse_softmax_cross_entropy(scores, labels)}


def true_mean_loss(model: TinyModel, dataset: TinyDataset) -> float:
    scores = scores_of(model, dataset.points).astype(np.float64)
    own = np.take_along_axis(scores, dataset.labels[:, None], axis=1)[:, 0]
    return float((np.log(np.exp(scores).sum(axis=1)) - own).mean())


@pytest.mark.parametrize("losses_name", [None, "each_loss"], ids=["of scores", "of the model"])
@pytest.mark.parametrize(("length", "batch"), [(21, 4), (3, 8), (1, 1)])
def test_the_mean_loss_is_that_of_all_samples_whatever_the_batches(
    model: TinyModel, length: int, batch: int, losses_name: Any
) -> None:
    dataset = TinyDataset(length)
    loader = build_image_test_loader(dataset, batch, num_workers=0)
    evaluators = [PerplexityEvaluator(losses_name=losses_name), ClsEvaluator((1,))]
    found = inference_on_dataset(WithLosses(model), loader, batch, 1e5, to_global, "cpu", evaluators)
    assert found["loss"] == pytest.approx(true_mean_loss(model, dataset), rel=1e-5)
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]), rel=1e-12)


def test_labels_below_0_do_not_count(model: TinyModel) -> None:
    dataset = TinyDataset(10)
    expected = true_mean_loss(model, dataset)
    doubled = TinyDataset(20)
    doubled.points[:10], doubled.labels[:10] = dataset.points, dataset.labels
    doubled.labels[10:] = [-1, -100] * 5
    loader = build_image_test_loader(doubled, 4, num_workers=0)
    found = inference_on_dataset(model, loader, 4, 1e5, to_global, "cpu", MeanLossEvaluator())
    assert found == {"loss": pytest.approx(expected, rel=1e-5)}


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32, np.bool_])
def test_labels_may_have_any_integer_dtype(model: TinyModel, dtype: Any) -> None:
    dataset = TinyDataset(10)
    dataset.labels = dataset.labels.clip(max=1)
    expected = true_mean_loss(model, dataset)
    dataset.labels = dataset.labels.astype(dtype)
    loader = build_image_test_loader(dataset, 4, num_workers=0)
    found = inference_on_dataset(model, loader, 4, 1e5, to_global, "cpu", MeanLossEvaluator())
    assert found == {"loss": pytest.approx(expected, rel=1e-5)}


def test_tokens_whose_loss_mask_is_0_do_not_count() -> None:
    evaluator = MeanLossEvaluator(losses_name="each_loss")
    inputs = {"labels": flow.tensor([[0, -1, 2], [1, 1, 1]]), "loss_mask": flow.tensor([[1, 1, 0], [1, 0, 1]])}
    losses = {"each_loss": flow.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])}
    evaluator.process(inputs, evaluator.prepare(inputs, losses))
    assert evaluator.evaluate() == {"loss": (1 + 8 + 32) / 3}


@pytest.mark.parametrize("name", ["labels", "loss_mask"])
@pytest.mark.parametrize("shape", [(2,), (2, 2, 1), (2, 3)])
def test_what_says_which_losses_count_has_a_number_for_each(name: str, shape: tuple[int, ...]) -> None:
    evaluator = MeanLossEvaluator(losses_name="each_loss")
    with pytest.raises(SchemaError, match=rf"'{name}' has the shape \[2.*, but the losses \[2, 2\]"):
        evaluator.process({name: flow.zeros(*shape)}, evaluator.prepare({}, {"each_loss": flow.ones(2, 2)}))


def test_samples_may_share_a_loss_mask() -> None:
    evaluator = MeanLossEvaluator(losses_name="each_loss")
    outputs = evaluator.prepare({}, {"each_loss": flow.tensor([[1.0, 2.0], [4.0, 8.0]])})
    evaluator.process({"loss_mask": flow.tensor([[0, 1]])}, outputs)
    assert evaluator.evaluate() == {"loss": 5}


@pytest.mark.parametrize(
    "results",
    [
        {"accuracy": "high"},
        {"task": {"accuracy": [1.0]}},
        [1.0],
        1.0,
        *({"a": odd} for odd in (np.ones(2), "0.5", 10**400)),
    ],
)
def test_results_that_are_no_numbers_by_names_are_refused(results: Any) -> None:
    with pytest.raises(SchemaError, match=r"the evaluation on digits returned .*; return a dict of numbers"):
        print_csv_format(results, "digits")


class Returning(nn.Module):
    """Returns what it is told to, made of the scores of a model."""

    def __init__(self, model: TinyModel, outputs: Any) -> None:
        super().__init__()
        self.model, self.outputs = model, outputs

    def forward(self, points: Any, labels: Any) -> Any:
        return self.outputs(self.model(points)["prediction_scores"])


def one_loss(scores: Any) -> dict[str, Any]:
    return {"prediction_scores": scores, "loss": scores.mean()}


class PreparesNothing(Collecting):
    def prepare(self, inputs: Any, outputs: Any) -> Any:
        return None


@pytest.mark.parametrize(
    ("outputs", "evaluator", "message"),
    [
        (one_loss, ClsEvaluator(scores_name="logits"), "'logits'"),
        (one_loss, MeanLossEvaluator("logits"), "needs 'logits'"),
        (one_loss, MeanLossEvaluator(labels_name="targets"), "needs 'targets'"),
        (lambda scores: {"each_loss": scores[:, 0]}, MeanLossEvaluator("each_loss"), "must have one dim more"),
        (one_loss, MeanLossEvaluator(losses_name="loss"), "one number for the whole batch"),
        (lambda scores: scores, Collecting(), "the model returned a Tensor; it must return a dict of tensors"),
        (lambda scores: (scores,), [Collecting()], "the model returned a tuple; it must return a dict of tensors"),
        (lambda scores: {"a": 0.5}, Collecting(), "'a' is a float, and no tensor of OneFlow"),
        (
            lambda scores: {"a": [scores, scores.numpy()]},
            Collecting(),
            r"'a\.1' is a ndarray, and no tensor of OneFlow",
        ),
        (lambda scores: {"a": scores}, PreparesNothing(), "prepare of PreparesNothing returned a NoneType; it must"),
        (lambda scores: {"a": scores}, [PreparesNothing()], "prepare of PreparesNothing returned a NoneType; it must"),
    ],
)
def test_outputs_that_are_no_tensors_by_names_or_that_an_evaluator_cannot_use_are_refused(
    model: TinyModel, outputs: Any, evaluator: Any, message: str
) -> None:
    loader = build_image_test_loader(TinyDataset(4), 4, num_workers=0)
    with pytest.raises(SchemaError, match=message):
        inference_on_dataset(Returning(model, outputs), loader, 4, 1e5, to_global, "cpu", evaluator)


@pytest.mark.parametrize("others", [0, 1])
def test_an_output_that_is_none_is_left_out(model: TinyModel, others: int) -> None:
    loader = build_image_test_loader(TinyDataset(4), 4, num_workers=0)
    returning = Returning(model, lambda scores: {"prediction_scores": scores, "loss": None})
    evaluator: Any = [ClsEvaluator((1,)), Collecting()] if others else ClsEvaluator((1,))
    assert "Acc@1" in inference_on_dataset(returning, loader, 4, 1e5, to_global, "cpu", evaluator)


@pytest.mark.parametrize("evaluator", [object(), [Collecting(), object()], Collecting])
def test_what_is_no_evaluator_is_refused(model: TinyModel, evaluator: Any) -> None:
    loader = build_image_test_loader(TinyDataset(4), 4, num_workers=0)
    words = (
        r"the evaluator is (a object, which has no method reset|the class Collecting; create one: Collecting\(...\))"
    )
    with pytest.raises(ConfigError, match=words):
        inference_on_dataset(model, loader, 4, 1e5, to_global, "cpu", evaluator)


def test_without_a_label_that_counts_there_is_no_mean() -> None:
    with pytest.raises(SchemaError, match="nothing was evaluated"):
        MeanLossEvaluator().evaluate()


@pytest.mark.parametrize(("loss", "perplexity"), [(1e4, np.inf), (np.nan, np.nan)])
def test_a_perplexity_beyond_all_numbers_is_infinite_and_that_of_nan_is_nan(loss: float, perplexity: float) -> None:
    evaluator = PerplexityEvaluator()
    evaluator.process({}, {"losses of MeanLossEvaluator": flow.tensor([loss])})
    np.testing.assert_equal(evaluator.evaluate(), {"perplexity": perplexity, "loss": loss})


def test_what_an_evaluator_makes_of_the_outputs_travels_instead_of_them(model: TinyModel) -> None:
    class Sums(Collecting):
        def prepare(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> dict[str, Any]:
            return {"sums": outputs["prediction_scores"].sum(dim=1)}

    sums, everything = Sums(), Collecting()
    loader = build_image_test_loader(TinyDataset(5), 4, num_workers=0)
    evaluators = DatasetEvaluators([sums, DatasetEvaluators([everything])])
    with pytest.raises(ValueError, match="'batches'"):
        inference_on_dataset(model, loader, 4, 1e5, to_global, "cpu", evaluators)
    for some, all_of_them in zip(sums.outputs, everything.outputs):
        assert list(some) == ["sums"]
        np.testing.assert_allclose(some["sums"], all_of_them["prediction_scores"].sum(axis=1), atol=1e-6)
