from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import oneflow as flow
import pytest

from configs.models.vit import VisionTransformer
from libai_data.delivery import to_global
from libai_data.engine.batches import name_inputs, part_inputs
from libai_data.engine.checkpoint.optimizer_state import collect
from libai_data.engine.events import EventStorage
from libai_data.engine.graph import GraphBase
from libai_data.engine.step_trainers import EagerTrainer, GraphTrainer
from libai_data.errors import ConfigError, SchemaError
from libai_data.structures import DistTensorData, Instance
from tests.deadline import run_to_end
from tests.engine.tiny import FEATURES, GRAPH_BALLAST, TinyDataset, TinyModel, on_one_rank, weights

MICRO_BATCHES = 3


def micro_batches() -> Any:
    draw = np.random.default_rng(0)
    while True:
        images = draw.standard_normal((8, 1, 8, 8)).astype(np.float32)
        yield Instance(images=DistTensorData(images), labels=DistTensorData(draw.integers(0, 10, 8)))


def parameters_after_two_steps(graph_mode: bool) -> dict[str, np.ndarray]:
    model = VisionTransformer(image_size=8, patch_size=2, in_channels=1, num_classes=10, dim=16, depth=2, num_heads=2)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    trainer: Any
    if graph_mode:
        graph = GraphBase(model, optimizer, grad_acc_steps=MICRO_BATCHES)
        trainer = GraphTrainer(graph, micro_batches(), MICRO_BATCHES)
    else:
        trainer = EagerTrainer(model, micro_batches(), optimizer, MICRO_BATCHES)
    with EventStorage(0):
        for trainer.iter in range(2):
            trainer.max_iter = 2
            trainer.run_step(to_global, "cpu")
    return {name: parameter.numpy().copy() for name, parameter in model.named_parameters()}


@pytest.mark.slow
def test_a_graph_accumulates_the_gradients_that_eager_mode_accumulates() -> None:
    eager, graph = parameters_after_two_steps(False), parameters_after_two_steps(True)
    for name, value in eager.items():
        np.testing.assert_allclose(graph[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("graph_mode", [False, True])
def test_a_part_in_eval_mode_stays_in_eval_mode(graph_mode: bool) -> None:
    model = on_one_rank(TinyModel(ballast=GRAPH_BALLAST, dropout=1.0))
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    dataset: Any = TinyDataset(4)
    batches = [dataset[0:4]]
    trainer: Any = (
        GraphTrainer(GraphBase(model, optimizer), batches) if graph_mode else EagerTrainer(model, batches, optimizer)
    )
    model.dropout.eval()
    before = weights(model)
    with EventStorage(0):
        trainer.max_iter = 1
        trainer.run_step(to_global, "cpu")
    assert (model.first.weight.numpy() != before["first.weight"]).any()  # Dropout of all features would stop this.


class WithCounts(TinyModel):
    def forward(self, points: Any, labels: Any = None) -> Any:
        outputs = TinyModel.forward(self, points, labels)
        return {**outputs, "any": labels >= 0, "sum": (labels + 3).sum()}


@pytest.mark.parametrize("graph_mode", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_outputs_that_are_no_floats_are_logged_as_their_mean(graph_mode: bool, accumulate: int) -> None:
    model = on_one_rank(WithCounts(ballast=GRAPH_BALLAST))
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    batches = [inputs_of(TinyModel, 4)] * 2
    trainer: Any
    if graph_mode:
        trainer = GraphTrainer(GraphBase(model, optimizer, grad_acc_steps=accumulate), batches, accumulate)
    else:
        trainer = EagerTrainer(model, batches, optimizer, accumulate)
    with EventStorage(0) as storage:
        trainer.max_iter = 1
        trainer.run_step(lambda batch: batch, "cpu")
    assert {name: storage.latest()[name][0] for name in ("any", "sum")} == {"any": 1.0, "sum": 12.0}


class WithStatistics(TinyModel):
    def __init__(self, ballast: int) -> None:
        super().__init__(ballast=ballast)
        self.norm = flow.nn.BatchNorm1d(FEATURES)

    def forward(self, points: Any, labels: Any = None) -> Any:
        return TinyModel.forward(self, self.norm(points), labels)


def test_running_statistics_of_several_micro_batches_are_refused() -> None:
    model = on_one_rank(WithStatistics(GRAPH_BALLAST))
    graph = GraphBase(model, flow.optim.SGD(model.parameters(), lr=0.1), grad_acc_steps=2)
    with pytest.raises(ConfigError, match=r"model\.norm has running statistics, .*num_accumulation_steps=1"):
        graph(**name_inputs([inputs_of(TinyModel, 4)] * 2))


class WithTwins(TinyModel):
    def __init__(self, ballast: int) -> None:
        super().__init__(ballast=ballast)
        self.first.scale = self.first.factor = flow.nn.Parameter(flow.ones(1))
        self.register_buffer("shift", flow.full((1,), 0.5))
        self.register_buffer("moved", self.shift)

    def forward(self, points: Any, labels: Any = None) -> Any:
        moved = (points + self.shift) * self.first.scale + self.moved
        return TinyModel.forward(self, moved * self.first.factor, labels)


def test_a_graph_trains_parts_that_a_module_has_under_two_names() -> None:
    ends = []
    for graph_mode in (False, True):
        model = on_one_rank(WithTwins(GRAPH_BALLAST))
        optimizer = flow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        graph = GraphBase(model, optimizer) if graph_mode else None
        batches = [inputs_of(TinyModel, 4)] * 2
        trainer: Any = GraphTrainer(graph, batches) if graph_mode else EagerTrainer(model, batches, optimizer)
        with EventStorage(0):
            for trainer.iter in range(2):
                trainer.run_step(lambda batch: batch, "cpu")
        momenta = collect(model, optimizer, graph)[1].items()
        ends.append({**weights(model), **{name: each.numpy() for name, each in momenta}})
    assert ends[0].keys() == ends[1].keys()
    for name, value in ends[0].items():
        np.testing.assert_allclose(ends[1][name], value, rtol=1e-5, err_msg=name)


class OfSeveralLoaders(TinyModel):
    def forward(self, points: Any, labels: Any = None) -> Any:
        return TinyModel.forward(self, points["a"], labels)  # In a graph, `self` is a proxy, which `super` refuses.


def inputs_of(kind: type[TinyModel], rows: int) -> Any:
    points, labels = np.ones((rows, FEATURES), np.float32), np.zeros(rows, np.int64)
    return to_global({"points": points if kind is TinyModel else {"a": points}, "labels": labels}, device_type="cpu")


@pytest.mark.parametrize(("kind", "name"), [(TinyModel, "points"), (OfSeveralLoaders, "points.a")])
def test_a_smaller_last_batch_is_refused_in_training_with_the_remedy(kind: type[TinyModel], name: str) -> None:
    model = on_one_rank(kind(ballast=GRAPH_BALLAST))
    graph = GraphBase(model, flow.optim.SGD(model.parameters(), lr=0.1))
    graph(**inputs_of(kind, 4))
    with pytest.raises(SchemaError, match=rf"'{name}' has the shape \(2, 6\), but .* for \(4, 6\).*drop_last=True"):
        graph(**inputs_of(kind, 2))


@pytest.mark.parametrize("kind", [TinyModel, OfSeveralLoaders])
def test_a_smaller_last_batch_is_evaluated(kind: type[TinyModel]) -> None:
    model = on_one_rank(kind(ballast=GRAPH_BALLAST)).eval()
    graph = GraphBase(model, is_train=False)
    for rows in (4, 2, 4):
        found, expected = (each(**inputs_of(kind, rows))["prediction_scores"].numpy() for each in (graph, model))
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (flow.optim.SGD, {"momentum": 0.9}),
        (flow.optim.Adam, {"amsgrad": True}),
        (flow.optim.LAMB, {}),
        (flow.optim.RMSprop, {"centered": True}),
        (flow.optim.Adagrad, {}),
        (flow.optim.Adadelta, {}),
    ],
)
def test_an_optimizer_has_the_same_state_in_both_modes(kind: Any, options: dict[str, Any]) -> None:
    states = []
    for graph_mode in (False, True):
        model = on_one_rank(TinyModel(ballast=GRAPH_BALLAST))
        optimizer = kind(model.parameters(), lr=0.1, **options)
        graph = GraphBase(model, optimizer) if graph_mode else None
        if graph is not None:
            graph(**inputs_of(TinyModel, 4))
        else:
            model(**inputs_of(TinyModel, 4))["loss"].backward()
            optimizer.step()
        step, slots = collect(model, optimizer, graph)
        of_model = {name: value.numpy() for name, value in slots.items() if not name.startswith("graph/")}
        states.append((step, of_model))
    (steps, eager), (steps_of_graph, of_graph) = states
    assert (steps_of_graph, of_graph.keys()) == (steps, eager.keys())
    for name, value in eager.items():
        np.testing.assert_allclose(of_graph[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


class OwnSchedule(flow.optim.lr_scheduler.CosineDecayLR):
    def get_lr(self, base_lr: float, step: int) -> float:
        return base_lr / (1 + step)


class OwnOptimizer(flow.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("part", ["OwnOptimizer", "OwnSchedule", "OwnSchedule after a warm-up", "LambdaLR"])
def test_steps_that_are_computed_in_python_are_refused(part: str) -> None:
    model = on_one_rank(TinyModel(ballast=GRAPH_BALLAST))
    optimizer = (OwnOptimizer if part == "OwnOptimizer" else flow.optim.SGD)(model.parameters(), lr=0.1)
    schedule: Any = None
    if part == "LambdaLR":
        schedule = flow.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1)
    elif part != "OwnOptimizer":
        schedule = OwnSchedule(optimizer, 10)
    if "warm-up" in part:
        schedule = flow.optim.lr_scheduler.WarmUpLR(schedule, warmup_iters=2)
    with pytest.raises(ConfigError, match=f"a graph cannot run {part.split()[0]}, because the class computes"):
        GraphBase(model, optimizer, schedule)


def test_clipped_gradients_of_adadelta_are_refused() -> None:
    model = on_one_rank(TinyModel(ballast=GRAPH_BALLAST))
    clip = {"clip_grad_max_norm": 1.0, "clip_grad_norm_type": 2.0}
    optimizer = flow.optim.Adadelta([{"params": [*model.parameters()], **clip}])
    with pytest.raises(ConfigError, match=r"cannot clip the gradients of Adadelta\. Leave out clip_grad_max_norm"):
        GraphBase(model, optimizer)


class WithOther(TinyModel):
    def __init__(self, other: Any) -> None:
        super().__init__(ballast=GRAPH_BALLAST)
        self.other = other

    def forward(self, points: Any, labels: Any = None) -> Any:
        return {**TinyModel.forward(self, points, labels), **self.other}


@pytest.mark.parametrize(("name", "value"), [("accuracy", 0.5), ("aux_loss", 1), ("losses", {"a": 1.0})])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_output_that_is_no_tensor_is_refused_by_name(name: str, value: Any, accumulate: int) -> None:
    model = on_one_rank(WithOther({name: value}))
    graph = GraphBase(model, flow.optim.SGD(model.parameters(), lr=0.1), grad_acc_steps=accumulate)
    inputs = [inputs_of(TinyModel, 4)] * accumulate
    with pytest.raises(SchemaError, match=f"returned '{name}', a {type(value).__name__}; in training, each output"):
        graph(**(inputs[0] if accumulate == 1 else name_inputs(inputs)))


def test_parameters_of_float64_are_refused() -> None:
    model = on_one_rank(TinyModel(ballast=GRAPH_BALLAST))
    model.first.to(flow.float64)
    with pytest.raises(ConfigError, match=r"a graph cannot train 'first\.weight' of float64\. Make it float32"):
        GraphBase(model, flow.optim.SGD(model.parameters(), lr=0.1))


class WithDropouts(TinyModel):
    def __init__(self) -> None:
        super().__init__(ballast=GRAPH_BALLAST)
        self.one, self.two = flow.nn.Dropout(0.5), flow.nn.Dropout(0.5)
        self.one.generator.manual_seed(1)
        self.two.generator.manual_seed(2)

    def forward(self, points: Any, labels: Any = None) -> Any:
        outputs = TinyModel.forward(self, points, labels)
        return {**outputs, "one": self.one(points), "two": self.two(points)}


def test_dropouts_of_a_graph_ignore_their_seeds() -> None:
    model = on_one_rank(WithDropouts())
    found = GraphBase(model, flow.optim.SGD(model.parameters(), lr=0.1))(**inputs_of(TinyModel, 4))
    assert 0 < (found["one"].numpy() == 0).sum() < 4 * FEATURES
    np.testing.assert_array_equal(found["one"].numpy(), found["two"].numpy())


class OfTwoInputs(TinyModel):
    def forward(self, points: Any, others: Any = None, nested: Any = None) -> Any:
        given = others if nested is None else nested["others"]
        return TinyModel.forward(self, points - 3 * given)


@pytest.mark.parametrize("is_nested", [False, True])
def test_the_order_of_inputs_does_not_matter(is_nested: bool) -> None:
    model = on_one_rank(OfTwoInputs(ballast=GRAPH_BALLAST)).eval()
    graph = GraphBase(model, is_train=False)
    points, others = (np.random.default_rng(seed).random((2, FEATURES), dtype=np.float32) for seed in (0, 1))
    if is_nested:
        orders: Any = [{"others": others, "more": points}, {"more": points, "others": others}]
        batches = [{"points": points, "nested": each} for each in orders]
    else:
        batches = [{"points": points, "others": others}, {"others": others, "points": points}]
    first, second = (graph(**to_global(each, device_type="cpu"))["prediction_scores"].numpy() for each in batches)
    np.testing.assert_array_equal(first, second)


def test_other_inputs_than_those_of_the_first_step_are_refused() -> None:
    model = on_one_rank(TinyModel(ballast=GRAPH_BALLAST))
    graph = GraphBase(model, flow.optim.SGD(model.parameters(), lr=0.1))
    inputs = inputs_of(TinyModel, 4)
    graph(**inputs)
    with pytest.raises(SchemaError, match=r"the inputs are \['points'\], but .* for \['labels', 'points'\]"):
        graph(points=inputs["points"])
    with pytest.raises(SchemaError, match=r"'labels' is oneflow.int32, but the graph is compiled for oneflow.int64"):
        graph(points=inputs["points"], labels=inputs["labels"].to(flow.int32))
    with pytest.raises(SchemaError, match=r"'labels' is None, but the graph is compiled for a tensor. Let get_batch"):
        graph(points=inputs["points"], labels=None)


@pytest.mark.parametrize("mode", ["dropout.training", "first.weight.requires_grad"])
def test_a_part_that_is_frozen_after_the_first_step_is_refused(mode: str) -> None:
    model = on_one_rank(TinyModel(ballast=GRAPH_BALLAST, dropout=0.5))
    graph = GraphBase(model, flow.optim.SGD(model.parameters(), lr=0.1))
    graph(**inputs_of(TinyModel, 4))
    setattr(model.first.weight if "weight" in mode else model.dropout, mode.rpartition(".")[2], False)
    with pytest.raises(ConfigError, match=rf"model\.{mode} is False, but .* compiled for True. Set it before"):
        graph(**inputs_of(TinyModel, 4))


class FailsAtFirst(TinyModel):
    has_failed = False

    def forward(self, points: Any, labels: Any = None) -> Any:
        if not FailsAtFirst.has_failed:
            FailsAtFirst.has_failed = True
            raise ValueError("a mistake")
        return TinyModel.forward(self, points, labels)


def test_a_graph_whose_compilation_has_failed_is_refused_with_the_remedy() -> None:
    model = on_one_rank(FailsAtFirst(ballast=GRAPH_BALLAST))
    graphs = [GraphBase(model, flow.optim.SGD(model.parameters(), lr=0.1)) for _ in range(2)]
    with pytest.raises(ValueError, match="a mistake"):
        graphs[0](**inputs_of(TinyModel, 4))
    with pytest.raises(ConfigError, match=r"\(GraphBase_\d+\) has failed before, .* Make a new trainer, or"):
        graphs[0](**inputs_of(TinyModel, 4))
    assert np.isfinite(graphs[1](**inputs_of(TinyModel, 4))["loss"].numpy())


class CallsSuper(TinyModel):
    def forward(self, points: Any, labels: Any = None) -> Any:
        return super().forward(points, labels)


@pytest.mark.parametrize("is_train", [True, False])
def test_a_forward_that_calls_super_is_refused_with_the_remedy(is_train: bool) -> None:
    model = on_one_rank(CallsSuper(ballast=GRAPH_BALLAST))
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1) if is_train else None
    graph = GraphBase(model, optimizer, is_train=is_train)
    with pytest.raises(ConfigError, match=r"forward calls super\(\).* as in Parent\.forward\(self, x\), or set graph"):
        graph(**inputs_of(TinyModel, 4))


def test_a_part_that_is_replaced_or_added_after_the_graph_was_built_is_refused() -> None:
    model = on_one_rank(TinyModel(ballast=GRAPH_BALLAST))
    replaced, added = (GraphBase(model, is_train=False) for _ in range(2))
    model.third = flow.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"model\.third was added after the graph was built"):
        added(**inputs_of(TinyModel, 4))
    del model.third
    model.second.weight = flow.nn.Parameter(flow.zeros_like(model.second.weight))
    with pytest.raises(ConfigError, match=r"model\.second\.weight was replaced after the graph was built"):
        replaced(**inputs_of(TinyModel, 4))


@pytest.mark.parametrize("name", ["second", "second.bias", "ballast"])
def test_a_part_that_is_replaced_after_the_first_step_is_refused(name: str) -> None:
    model = on_one_rank(TinyModel(ballast=GRAPH_BALLAST))
    graph = GraphBase(model, flow.optim.SGD(model.parameters(), lr=0.1))
    graph(**inputs_of(TinyModel, 4))
    other = on_one_rank(TinyModel(ballast=GRAPH_BALLAST))
    if name == "second.bias":
        model.second.bias = other.second.bias
    else:
        setattr(model, name, getattr(other, name))
    with pytest.raises(ConfigError, match=rf"model\.{name} was replaced after the graph was built"):
        graph(**inputs_of(TinyModel, 4))


class Scaled(TinyModel):
    def __init__(self) -> None:
        super().__init__(ballast=GRAPH_BALLAST)
        self.scale, self.steps = 1.0, [0]

    def forward(self, points: Any, labels: Any = None) -> Any:
        return TinyModel.forward(self, points * self.scale, labels)


def test_the_log_warns_once_of_numbers_of_the_model_that_change(caplog: pytest.LogCaptureFixture) -> None:
    model = on_one_rank(Scaled())
    graph = GraphBase(model, flow.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        model.steps = [step]
        model.scale = 0.5 ** (step // 2)
        graph(**inputs_of(TinyModel, 4))
        assert caplog.text.count("model.scale is now 0.5, but") == (step > 1)
    assert "model.steps" not in caplog.text


@pytest.mark.parametrize("name", ["scale", "second"])
def test_a_graph_for_evaluation_follows_changes_of_the_model(name: str) -> None:
    model = on_one_rank(Scaled()).eval()
    graph = GraphBase(model, is_train=False)
    before = graph(**inputs_of(TinyModel, 4))["prediction_scores"].numpy()
    setattr(model, name, 3.0 if name == "scale" else on_one_rank(flow.nn.Linear(8, 3)))
    found, expected = (each(**inputs_of(TinyModel, 4))["prediction_scores"].numpy() for each in (graph, model))
    np.testing.assert_allclose(found, expected)
    assert not np.allclose(found, before)


def test_a_graph_keeps_the_tensor_of_a_weight_whose_data_is_assigned() -> None:
    model = on_one_rank(TinyModel(ballast=GRAPH_BALLAST)).eval()
    graph = GraphBase(model, is_train=False)
    inputs = inputs_of(TinyModel, 4)
    before = graph(**inputs)["prediction_scores"].numpy()
    model.second.weight.data = flow.zeros_like(model.second.weight)
    np.testing.assert_array_equal(graph(**inputs)["prediction_scores"].numpy(), before)
    assert (model(**inputs)["prediction_scores"].numpy() != before).any()


def test_a_graph_for_evaluation_follows_the_model_into_training_mode() -> None:
    model = on_one_rank(TinyModel(ballast=GRAPH_BALLAST))
    graph = GraphBase(model, is_train=False)
    assert [[*graph(**inputs_of(TinyModel, 4)).keys()] for model.training in (False, True)] == [
        ["prediction_scores"],
        ["loss"],
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2.0, "a float, but the inputs of a graph are tensors"),
        ([1, 2], "a list, but the inputs of a graph are tensors"),
        (np.ones(1), "a ndarray, but the inputs of a graph are tensors"),
        (["a", "b"], "text, .* Select the other fields"),
    ],
)
def test_an_input_that_is_no_tensor_is_refused(value: Any, message: str) -> None:
    graph = GraphBase(on_one_rank(WithNames(ballast=GRAPH_BALLAST)), is_train=False)
    with pytest.raises(SchemaError, match=f"'names' is {message}"):
        graph(**inputs_of(TinyModel, 2), names=value)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_forward_hooks_are_refused_in_training_and_called_in_evaluation(register: str) -> None:
    model = on_one_rank(TinyModel(ballast=GRAPH_BALLAST))
    calls: list[Any] = []
    getattr(model.first, register)(lambda *seen: calls.append(seen))
    GraphBase(model, is_train=False)(**inputs_of(TinyModel, 4))
    assert len(calls) == 1
    with pytest.raises(ConfigError, match=r"model\.first has forward hooks, .* which a graph does not call"):
        GraphBase(model, flow.optim.SGD(model.parameters(), lr=0.1))(**inputs_of(TinyModel, 4))


class WithNames(TinyModel):
    def forward(self, points: Any, labels: Any = None, names: Any = None) -> Any:
        return TinyModel.forward(self, points, labels)


def test_inputs_of_many_micro_batches_are_found_again() -> None:
    batches = [{"images": number, "labels_1": -number} for number in range(12)]
    assert part_inputs(name_inputs(batches), 12) == batches


def threads() -> set[int]:
    return {int(thread) for thread in os.listdir("/proc/self/task")}


def call_a_graph() -> None:
    """In a process of its own: threads that OneFlow started once serve all later graphs."""
    placement = flow.placement("cpu", [0])
    model = TinyModel(ballast=GRAPH_BALLAST).to_global(placement=placement, sbp=flow.sbp.broadcast)
    graph = GraphBase(model, is_train=False)
    points = flow.ones(2, FEATURES).to_global(placement=placement, sbp=flow.sbp.broadcast)
    before = threads()
    first = graph(points=points)["prediction_scores"].numpy()
    started = threads() - before
    assert started
    assert {os.sched_getscheduler(thread) for thread in started} == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    for _ in range(20):
        np.testing.assert_array_equal(graph(points=points)["prediction_scores"].numpy(), first)


def test_the_threads_of_a_graph_do_not_take_the_core_of_the_one_that_launches_it() -> None:
    code = "from tests.engine.test_graph import call_a_graph as call; call()"
    done = run_to_end([sys.executable, "-X", "faulthandler", "-c", code])
    assert done.returncode == 0, done.stderr
