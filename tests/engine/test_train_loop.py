from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import oneflow as flow
import pytest
from oneflow import nn

from libai_data.data.samplers import CyclicSampler, StreamState
from libai_data.data.samplers.walk import UNKNOWN
from libai_data.engine import hooks
from libai_data.engine.events import EventStorage, get_event_storage
from libai_data.engine.step_trainers import EagerTrainer
from libai_data.engine.train_loop import HookBase, TrainerBase
from libai_data.errors import ConfigError, ContractError


class Recorder(HookBase):
    """Notes its calls."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self.calls = calls

    def before_train(self) -> None:
        self.calls.append(f"{self.name} before_train")

    def after_train(self) -> None:
        self.calls.append(f"{self.name} after_train {self.trainer.iter}")

    def before_step(self) -> None:
        self.calls.append(f"{self.name} before_step {self.trainer.iter}")

    def after_step(self) -> None:
        self.calls.append(f"{self.name} after_step {self.trainer.iter}")

    def close(self) -> None:
        self.calls.append(f"{self.name} close")


class CountingTrainer(TrainerBase):
    """Notes its steps, and fails in one."""

    def __init__(self, calls: list[str], fails_at: int = -1) -> None:
        super().__init__()
        self.calls = calls
        self.fails_at = fails_at

    def run_step(self) -> None:
        if self.iter == self.fails_at:
            raise ValueError(f"step {self.iter} fails")
        self.calls.append(f"step {self.iter}")


def test_hooks_are_called_in_their_order_around_each_step() -> None:
    calls: list[str] = []
    trainer = CountingTrainer(calls)
    trainer.register_hooks([Recorder("a", calls), None, Recorder("b", calls)])
    trainer.train(3, 5)
    steps = []
    for step in (3, 4):
        steps += [f"a before_step {step}", f"b before_step {step}", f"step {step}"]
        steps += [f"a after_step {step}", f"b after_step {step}"]
    ends = ["a after_train 5", "b after_train 5", "a close", "b close"]
    assert calls == ["a before_train", "b before_train", *steps, *ends]


@pytest.mark.parametrize("method", ["before_train", "before_step", "after_step"])
def test_a_hook_that_changes_the_step_of_the_trainer_is_named(method: str) -> None:
    class Jumps(HookBase):
        pass

    def jump(hook: HookBase) -> None:
        hook.trainer.iter += 2

    setattr(Jumps, method, jump)
    trainer = CountingTrainer([])
    trainer.register_hooks([Recorder("a", []), Jumps()])
    with pytest.raises(ContractError, match=rf"^Jumps.{method} changed trainer.iter from 3 to 5 on rank 0; "):
        trainer.train(3, 9)


def test_after_a_failed_step_hooks_are_only_closed_and_all_of_them() -> None:
    calls: list[str] = []

    class Unclosable(HookBase):
        def close(self) -> None:
            raise OSError("no")

    trainer = CountingTrainer(calls, fails_at=1)
    trainer.register_hooks([Unclosable(), Recorder("a", calls)])
    with pytest.raises(ValueError, match="step 1 fails"):
        trainer.train(0, 3)
    assert calls[-2:] == ["a before_step 1", "a close"]


def test_the_storage_is_that_of_the_running_training() -> None:
    class Putting(HookBase):
        def after_step(self) -> None:
            get_event_storage().put_scalar("seen", self.trainer.iter)

    trainer = CountingTrainer([])
    trainer.register_hooks([Putting()])
    trainer.train(0, 3)
    assert trainer.storage.history("seen").values() == [(0.0, 0), (1.0, 1), (2.0, 2)]
    with pytest.raises(RuntimeError, match="no training is running"):
        get_event_storage()


def test_the_share_of_waiting_counts_every_step_of_a_long_period() -> None:
    class Waiting(CountingTrainer):
        def run_step(self) -> None:
            self.storage.put_scalar("data_time", 0.5)

    trainer = Waiting([])
    trainer.register_hooks([hooks.IterationTimer(8, period=1500)])
    with mock.patch("time.perf_counter", side_effect=count()):  # each step takes a second
        trainer.train(0, 1500)
    assert trainer.storage.latest()["data_wait_share"] == (0.5, 1499)


@pytest.mark.parametrize(("starts", "logged"), [((4, 9), {"position": (9, 0), "epoch": (0.75, 0)}), ((4, UNKNOWN), {})])
def test_no_place_is_logged_where_only_other_ranks_know_some_lanes(starts: Any, logged: dict[str, Any]) -> None:
    state = StreamState(8, CyclicSampler(range(12), 1).order, start=starts)
    trainer = CountingTrainer([])
    trainer.register_hooks([hooks.DataProgress(SimpleNamespace(stream=SimpleNamespace(state=state)), 8, 1)])
    trainer.train(0, 1)
    assert trainer.storage.latest() == logged


@pytest.mark.parametrize("value", ["good", None, flow.ones(2)])
def test_a_scalar_that_is_no_number_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=r"the scalar 'norm' is .*; put a single number"):
        EventStorage().put_scalar("norm", value)


def test_only_hooks_can_be_registered() -> None:
    with pytest.raises(TypeError, match="HookBase"):
        CountingTrainer([]).register_hooks([object()])  # type: ignore[list-item]


@pytest.mark.parametrize("period", [0, -1, 1.5, None, "x", float("inf")])
def test_hooks_refuse_periods_that_are_no_number_of_steps(period: Any) -> None:
    makers: list[Any] = [
        lambda: hooks.IterationTimer(8, period),
        lambda: hooks.DataProgress([], 8, period),
        lambda: hooks.PeriodicWriter([], period),
        lambda: hooks.PeriodicCheckpointer(None, period),  # type: ignore[arg-type]
        lambda: EagerTrainer(nn.Linear(1, 1), [], None, period),
    ]
    if period != 0:
        makers.append(lambda: hooks.EvalHook(period, dict))
        makers.append(lambda: hooks.BestCheckpointer(period, None, "loss"))  # type: ignore[arg-type]
    for make in makers:
        with pytest.raises(ConfigError, match=r"(period|grad_acc_steps) is .*; it must be an int"):
            make()


def test_a_metric_that_the_evaluation_has_not_ends_the_training_at_the_first_evaluation() -> None:
    trainer = CountingTrainer([])
    best = hooks.BestCheckpointer(2, None, "Acc@5")  # type: ignore[arg-type]
    trainer.register_hooks([hooks.EvalHook(2, lambda: {"Acc@15": 1.0}), best])
    message = r"train\.evaluation\.eval_metric is 'Acc@5', but .* \['Acc@15'\]\. Did you mean 'Acc@15'"
    with pytest.raises(ConfigError, match=message):
        trainer.train(0, 8)
    assert trainer.iter == 1


class PutsAccuracy(HookBase):
    def after_step(self) -> None:
        self.trainer.storage.put_scalar("accuracy", 0.5)


@pytest.mark.parametrize("results", [{"Acc@1": 1.0}, {}])
def test_a_number_of_the_training_is_no_metric_of_an_evaluation(results: dict[str, float]) -> None:
    for stopping in (
        hooks.BestCheckpointer(2, mock.Mock(), "accuracy"),
        hooks.EarlyStopping(2, "accuracy"),
    ):
        trainer = CountingTrainer([])
        trainer.register_hooks([PutsAccuracy(), hooks.EvalHook(2, lambda: results), stopping])
        with pytest.raises(ConfigError, match=r"is 'accuracy', but the evaluation has no such result; there are \["):
            trainer.train(0, 4)


def test_the_loss_of_an_evaluation_has_another_name_than_that_of_the_training() -> None:
    trainer = CountingTrainer([])
    results = {"loss": 1.0, "lm_loss": 2.0, "val_loss_a": 3.0, "Acc@1": 4.0, "Other": {"loss": 5.0}}
    best = hooks.BestCheckpointer(2, mock.Mock(), "loss", mode="min")
    trainer.register_hooks([hooks.EvalHook(2, lambda: results), best])
    trainer.train(0, 4)
    latest = {name: value for name, (value, _) in trainer.storage.latest().items() if value in range(1, 6)}
    names = {"val_loss": 1.0, "val_lm_loss": 2.0, "val_loss_a": 3.0, "Acc@1": 4.0, "Other/val_loss": 5.0}
    assert names.items() <= latest.items() and "loss" not in latest
    assert best.best_metric == 1.0


@pytest.mark.parametrize(("metric", "period"), [("Acc@1", 1), ("Acc@5", 0)], ids=["the default", "after the last step"])
def test_a_metric_that_may_be_missing_is_missed_once(
    metric: str, period: int, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = CountingTrainer([])
    best = hooks.BestCheckpointer(period, None, metric)  # type: ignore[arg-type]
    trainer.register_hooks([hooks.EvalHook(period, lambda: {"loss": 1.0}), best])
    trainer.train(0, 4)
    assert caplog.text.count(f"train.evaluation.eval_metric is '{metric}'") == 1


def test_a_later_training_that_ends_at_an_evaluation_of_an_earlier_one_has_its_own() -> None:
    trainer, evaluated = CountingTrainer([]), []

    def evaluate() -> dict[str, Any]:
        evaluated.append(trainer.iter)
        return {}

    trainer.register_hooks([hooks.EvalHook(3, evaluate)])
    trainer.train(0, 4)
    trainer.train(0, 3)
    assert evaluated == [2, 4, 3]
