from __future__ import annotations

from typing import Any, Callable

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from libai_data.delivery import to_global
from libai_data.delivery.build import build_image_train_loader
from libai_data.engine.graph import GraphBase
from libai_data.engine.hooks import IterationTimer, LRScheduler
from libai_data.engine.losses import LossBuffer, total_loss
from libai_data.engine.scheduler import WarmupCosineLR
from libai_data.engine.step_trainers import EagerTrainer, GraphTrainer
from libai_data.engine.train_loop import TrainerBase
from libai_data.errors import SchemaError
from tests.engine.tiny import GRAPH_BALLAST, TinyDataset, TinyModel, on_one_rank

STEPS = 8


class OneRank(TrainerBase):
    """Runs an inner trainer."""

    def __init__(
        self, inner: Any, optimizer: Any, lr_scheduler: Any, period: int = 1, get_batch: Any = to_global
    ) -> None:
        super().__init__()
        self.inner, self.optimizer, self.lr_scheduler, self.get_batch = inner, optimizer, lr_scheduler, get_batch
        inner.losses.period = period

    def run_step(self) -> None:
        self.inner.iter, self.inner.max_iter = self.iter, self.max_iter
        self.inner.run_step(self.get_batch, "cpu")


def losses_of(mode: str, micro_batch: int, accumulate: int, period: int = 1) -> tuple[Any, list[float]]:
    model = on_one_rank(TinyModel(ballast=GRAPH_BALLAST if mode == "graph" else 0))
    groups = [{"params": list(model.parameters()), "clip_grad_max_norm": 0.5, "clip_grad_norm_type": 2.0}]
    optimizer = flow.optim.AdamW(groups, lr=0.05)
    schedule = WarmupCosineLR(optimizer, STEPS, 0.1, 2)
    loader, _, _ = build_image_train_loader(TinyDataset(), micro_batch, num_workers=0)
    inner: Any
    if mode == "eager":
        inner = EagerTrainer(model, loader, optimizer, accumulate)
    else:
        graph = GraphBase(model, optimizer, schedule, grad_acc_steps=accumulate)
        inner = GraphTrainer(graph, loader, accumulate)
    trainer = OneRank(inner, optimizer, schedule, period)
    trainer.register_hooks([IterationTimer(micro_batch * accumulate, period), LRScheduler()])
    trainer.train(0, STEPS)
    return trainer, [value for value, _ in trainer.storage.history("total_loss").values()]


@pytest.fixture(scope="module")
def reference() -> list[float]:
    return losses_of("eager", 8, 1)[1]


def test_training_learns_and_notes_the_rates_that_steps_were_made_with(reference: list[float]) -> None:
    assert len(reference) == STEPS
    assert reference[-1] < 0.8 * reference[0]
    trainer, _ = losses_of("eager", 8, 1)
    rates = [value for value, _ in trainer.storage.history("lr").values()]
    assert rates[0] == pytest.approx(0.005)
    assert max(rates) == rates[2]


@pytest.mark.parametrize(
    ("mode", "micro_batch", "accumulate", "rtol"),
    [("eager", 4, 2, 2e-5), ("eager", 2, 4, 2e-5), ("graph", 8, 1, 1e-4), ("graph", 2, 4, 1e-4)],
)
def test_graphs_and_accumulated_micro_batches_train_like_one_eager_batch(
    mode: str, micro_batch: int, accumulate: int, rtol: float, reference: list[float]
) -> None:
    np.testing.assert_allclose(losses_of(mode, micro_batch, accumulate)[1], reference, rtol=rtol)


def test_losses_are_each_read_though_logged_rarely(reference: list[float]) -> None:
    trainer, losses = losses_of("eager", 8, 1, period=5)
    assert losses == reference
    assert [at for _, at in trainer.storage.history("total_loss").values()] == list(range(STEPS))
    # After steps 4 and 7 (the last).
    assert [at for _, at in trainer.storage.history("samples_per_second").values()] == [4, 7]
    assert trainer.storage.samples == STEPS * 8


def test_unread_losses_do_not_pile_up() -> None:
    buffer = LossBuffer(10**6)
    for iteration in range(99):
        buffer.add(iteration, {"loss": flow.zeros(1)})
        assert not buffer.is_due(iteration)
    buffer.add(99, {"loss": flow.zeros(1)})
    assert buffer.is_due(99)


@pytest.mark.parametrize("outputs", [{"accuracy": 1}, [1], flow.zeros(1)])
def test_a_model_without_losses_is_told_what_is_missing(outputs: Any) -> None:
    with pytest.raises(SchemaError, match="loss"):
        total_loss(outputs)


def test_losses_are_single_numbers_and_summed() -> None:
    with pytest.raises(SchemaError, match=r"'lm_loss' of shape \[2, 3\]; .* must be a single number"):
        total_loss({"lm_loss": flow.zeros(2, 3)})
    outputs = {name: flow.tensor(value) for name, value in {"lm_loss": 2.0, "loss_b": 3.0, "accuracy": 5.0}.items()}
    assert total_loss(outputs) == 5.0


class Scaled(nn.Module):
    """Returns what a function makes of its scaled input."""

    def __init__(self, losses: Callable[[Any], dict[str, Any]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(flow.ones(1))
        self.losses = losses

    def forward(self, x: Any) -> dict[str, Any]:
        return self.losses((self.weight * x).mean())


def trained(losses: Callable[[Any], dict[str, Any]], steps: int, accumulate: int, check_inputs: Any = None) -> OneRank:
    """A trainer after so many steps, each of batches of two ones."""
    model = Scaled(losses)
    inner = EagerTrainer(model, [flow.ones(2)], flow.optim.SGD(model.parameters(), lr=0.0), accumulate, check_inputs)
    trainer = OneRank(inner, inner.optimizer, None, get_batch=lambda data: {"x": data})
    trainer.train(0, steps)
    return trainer


def test_a_models_several_losses_are_each_shown() -> None:
    trainer = trained(lambda mean: {"a_loss": mean, "b_loss": 2 * mean}, 1, 2)
    latest = {name: value for name, (value, _) in trainer.storage.latest().items() if "loss" in name}
    assert latest == {"total_loss": 3.0, "a_loss": 1.0, "b_loss": 2.0}


def test_inputs_are_checked_once_before_the_model_sees_them() -> None:
    checked: list[Any] = []

    def loss(mean: Any) -> dict[str, Any]:
        assert checked
        return {"loss": mean}

    trained(loss, 3, 1, checked.append)
    assert len(checked) == 1


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_output_of_several_numbers_is_shown_as_their_mean_as_by_a_graph(accumulate: int) -> None:
    trainer = trained(lambda mean: {"loss": mean, "scores": flow.tensor([[1.0, 2.0], [3.0, 6.0]])}, 1, accumulate)
    assert trainer.storage.latest()["scores"] == (3.0, 0)


def test_outputs_of_micro_batches_with_different_numbers_of_rows_are_shown_as_the_mean_of_their_means() -> None:
    scores = iter([flow.tensor([1.0, 2.0, 6.0]), flow.tensor([4.0, 6.0])])
    trainer = trained(lambda mean: {"loss": mean, "scores": next(scores)}, 1, 2)
    assert trainer.storage.latest()["scores"] == (4.0, 0)


def test_gradients_of_a_group_that_a_training_adds_are_clipped() -> None:
    model = Scaled(lambda mean: {"loss": mean})
    optimizer = flow.optim.SGD([nn.Parameter(flow.ones(1))], lr=1.0)
    trainer = OneRank(EagerTrainer(model, [flow.ones(2)], optimizer), optimizer, None, get_batch=lambda x: {"x": x})
    group = {"params": [model.weight], "lr": 1.0, "clip_grad_max_norm": 0.25, "clip_grad_norm_type": 2.0}
    optimizer.add_param_group(group)
    trainer.train(0, 1)
    assert model.weight.item() == pytest.approx(0.75)


@pytest.mark.parametrize(("name", "value"), [("accuracy", 0.5), ("aux_loss", 1), ("losses", {"a": 1.0})])
def test_an_output_that_is_no_tensor_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(SchemaError, match=f"returned '{name}', a {type(value).__name__}; in training, each output"):
        trained(lambda mean: {"loss": mean, name: value}, 1, 1)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_output_that_is_none_is_left_out(accumulate: int) -> None:
    trainer = trained(lambda mean: {"loss": mean, "aux_loss": None, "scores": None}, 1, accumulate)
    assert trainer.storage.latest()["total_loss"] == (1.0, 0)
