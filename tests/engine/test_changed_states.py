"""What a training changes in its optimizer and model is restored; a state that no checkpoint can store is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import oneflow as flow
import pytest

from libai_data import LazyCall
from libai_data.engine.checkpoint import Checkpointer
from libai_data.engine.checkpoint import checkpointer as checkpointer_module
from libai_data.engine.data_state import PlainState
from libai_data.engine.optim import get_default_optimizer_params
from tests.engine import data_runs
from tests.engine.test_checkpointer import new_model, train
from tests.engine.tiny import CLASSES, TinyModel, assert_equal_weights, on_one_rank, weights


class Counts(flow.optim.SGD):
    """Its rate follows numbers that it keeps itself."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.calls, self.seen, self.period = 0, {"first": np.zeros(2)}, 5

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        self.seen["first"] += self.calls
        self.param_groups[0]["lr"] = 0.1 / self.calls
        super().step(closure)


def test_numbers_that_an_optimizer_keeps_itself_are_restored(tmp_path: Path) -> None:
    model = new_model()
    optimizer = Counts(model.parameters(), lr=0.1)
    checkpointer = Checkpointer(model, str(tmp_path), optimizer=optimizer)
    train(model, optimizer)
    checkpointer.save("a", iteration=1)
    train(model, optimizer)
    other = new_model()
    resumed = Counts(other.parameters(), lr=0.1)
    resumed.period = 7  # as the config of the resume says
    Checkpointer(other, str(tmp_path), optimizer=resumed).load(str(tmp_path / "a"))
    train(other, resumed)
    assert (resumed.calls, resumed.seen["first"].tolist(), resumed.period) == (4, [10.0, 10.0], 7)
    assert_equal_weights(other, weights(model))


def test_options_of_groups_that_a_training_has_changed_are_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def made(model: Any, **options: Any) -> Any:
        return flow.optim.AdamW(get_default_optimizer_params(model, **options), lr=0.1, weight_decay=0.1)

    model = new_model()
    optimizer = made(model, weight_decay_bias=0.0)
    checkpointer = Checkpointer(model, str(tmp_path), optimizer=optimizer)
    train(model, optimizer)
    optimizer.param_groups[0]["weight_decay"], optimizer.param_groups[1]["betas"] = 0.5, (0.5, 0.9)
    checkpointer.save("a", iteration=1)
    train(model, optimizer)
    other = new_model()
    resumed = made(other, weight_decay_bias=0.2)  # as the config of the resume says
    Checkpointer(other, str(tmp_path), optimizer=resumed).load(str(tmp_path / "a"))
    assert [group["weight_decay"] for group in resumed.param_groups] == [0.5, 0.2] and not caplog.records
    resumed.param_groups[1]["weight_decay"] = 0.0
    train(other, resumed)
    assert_equal_weights(other, weights(model))
    # Of code that runs before each first step, nothing is stored: it would run on its own result.
    again = Checkpointer(other, str(tmp_path), optimizer=resumed)
    resumed.param_groups[1]["eps"] = 1e-3
    again.note_start()
    again.save("b", iteration=2)
    last = new_model()
    optimizer = made(last, weight_decay_bias=0.0)
    Checkpointer(last, str(tmp_path), optimizer=optimizer).load(str(tmp_path / "b"))
    assert optimizer.param_groups[1]["eps"] == 1e-8
    other = new_model()
    Checkpointer(other, str(tmp_path), optimizer=made(other)).load(str(tmp_path / "a"))
    assert "AdamW had changed 'group of first.weight and 1 more/weight_decay' to 0.5 in the training; this is" in (
        caplog.text
    )


def test_a_tensor_that_an_optimizer_keeps_itself_is_refused() -> None:
    model = new_model()
    optimizer = Counts(model.parameters(), lr=0.1)
    checkpointer = Checkpointer(model, optimizer=optimizer)
    optimizer.mean = flow.zeros(2)
    with pytest.raises(TypeError, match=r"Counts changes its attribute 'mean' in the training, and checkpoints cannot"):
        checkpointer.check_states()


def test_a_state_that_rank_1_alone_cannot_store_ends_that_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer_module, "broadcast_py_object", lambda value: "")  # as rank 0 sends it
    own = SimpleNamespace(state_dict=lambda: {"x": object()})
    with pytest.raises(TypeError, match=r"store the state of the hook \(state\['x'\] is of type builtins.object"):
        Checkpointer(new_model(), hook=PlainState(own)).check_states()


class Anneals(TinyModel):
    """Scales its loss by the number of calls."""

    def __init__(self, period: int) -> None:
        super().__init__()
        self.calls, self.period, self.best = 0, period, np.float32(np.nan)
        self.cache: dict[str, Any] = {}
        self.first.phase = "warm-up"

    def forward(self, points: Any, labels: Any = None) -> dict[str, Any]:
        self.calls += 1
        self.cache["labels"], self.last = labels, labels  # no number, so it is made anew
        self.best, self.first.phase = np.float32(1 / self.calls), f"call {self.calls}"
        return {"loss": super().forward(points, labels)["loss"] * self.calls}


def test_numbers_modes_and_frozen_weights_that_a_training_changes_in_the_model_are_restored(tmp_path: Path) -> None:
    model = on_one_rank(Anneals(period=5))
    optimizer = flow.optim.SGD(model.parameters(), lr=0.01)
    checkpointer = Checkpointer(model, str(tmp_path), optimizer=optimizer)
    train(model, optimizer)
    model.second.bias.requires_grad_(False)
    model.first.eval()
    checkpointer.save("a", iteration=1)
    train(model, optimizer)
    other = on_one_rank(Anneals(period=7))  # as the config of the resume says
    resumed = flow.optim.SGD(other.parameters(), lr=0.01)
    Checkpointer(other, str(tmp_path), optimizer=resumed).load(str(tmp_path / "a"))
    assert (other.calls, other.best, other.first.phase, other.cache) == (2, np.float32(0.5), "call 2", {})
    assert [part.training for part in (other, other.first, other.second)] == [True, False, True]
    train(other, resumed)
    assert (other.calls, other.period) == (4, 7)
    assert_equal_weights(other, weights(model))


class TakesTurns(TinyModel):
    """Has a layer that every second step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.skipped = flow.nn.Linear(CLASSES, CLASSES)
        flow.nn.init.ones_(self.skipped.weight)
        flow.nn.init.zeros_(self.skipped.bias)

    def forward(self, points: Any, labels: Any = None) -> dict[str, Any]:
        self.calls += 1
        scores = self.second(self.first(points))
        scores = self.skipped(scores) if self.calls % 2 else scores
        return {"loss": flow._C.sparse_softmax_cross_entropy(scores, labels).mean()}


@pytest.mark.parametrize("stop_after", [4, 5])
def test_weights_without_a_gradient_continue_as_in_an_uninterrupted_training(tmp_path: Path, stop_after: int) -> None:
    def config(name: str) -> Any:
        cfg = data_runs.config_of(tmp_path / name, checkpointer={"period": 1})
        cfg.model = LazyCall(TakesTurns)()
        return cfg

    whole = data_runs.train(config("whole"))
    data_runs.train(config("parts"), stop_after=stop_after)
    resumed = data_runs.train(config("parts"), resume=True)
    assert_equal_weights(resumed.model, weights(whole.model))
