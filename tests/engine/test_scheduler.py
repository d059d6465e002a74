from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import oneflow as flow
import pytest
from oneflow import nn

from libai_data.engine import scheduler as schedules
from libai_data.engine.scheduler import ScheduleState
from libai_data.errors import ConfigError

BASE = 0.5


def optimizer() -> Any:
    return flow.optim.SGD([nn.Parameter(flow.zeros(1))], lr=BASE)


def rates(schedule: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(schedule.get_last_lr()[0])
        schedule.step()
    return found


def test_a_cosine_rises_linearly_to_the_cosine_if_it_warms_up_and_follows_it_down() -> None:
    found = rates(schedules.WarmupCosineLR(optimizer(), 20, 0.1, 5, alpha=0.01), 21)
    cosine = [BASE * (0.99 * 0.5 * (1 + math.cos(math.pi * step / 20)) + 0.01) for step in range(21)]
    assert found[0] == pytest.approx(0.1 * BASE)
    assert found[5:] == pytest.approx(cosine[5:])
    rises = [later - earlier for earlier, later in zip(found[:5], found[1:6])]
    assert rises == pytest.approx([(cosine[5] - 0.1 * BASE) / 5] * 5)
    assert rates(schedules.WarmupCosineLR(optimizer(), 20, 0.1, 0), 1) == [BASE]


@pytest.mark.parametrize(
    ("name", "options", "end"),
    [
        ("WarmupCosineAnnealingLR", {"eta_min": 0.1}, 0.1),
        ("WarmupStepLR", {"step_size": 10, "gamma": 0.5}, BASE / 4),
        ("WarmupMultiStepLR", {"milestones": [6, 12], "gamma": 0.5}, BASE / 4),
        ("WarmupExponentialLR", {"gamma": 0.9}, BASE * 0.9**20),
        ("WarmupPolynomialLR", {"end_learning_rate": 0.1}, 0.1),
    ],
)
def test_each_schedule_warms_up_and_ends_where_it_should(name: str, options: dict, end: float) -> None:
    schedule = getattr(schedules, name)(optimizer(), max_iter=20, warmup_factor=0.1, warmup_iter=5, **options)
    found = rates(schedule, 21)
    assert found[0] == pytest.approx(0.1 * BASE)
    assert found[20] == pytest.approx(end, rel=1e-3)


@pytest.mark.parametrize("milestones", [6, "6", None, [1.5], [-1], [12, 6], [6, 6], {}])
def test_milestones_that_are_no_rising_steps_are_refused(milestones: Any) -> None:
    with pytest.raises(ConfigError, match=r"milestones is .*; it must be a list of steps"):
        schedules.WarmupMultiStepLR(optimizer(), 20, 0.1, 5, milestones)


def test_a_text_in_place_of_cycle_is_refused() -> None:
    cycle: Any = "false"
    with pytest.raises(ConfigError, match="cycle is 'false'; it must be True or False"):
        schedules.WarmupPolynomialLR(optimizer(), 20, 0.1, 5, cycle=cycle)


def with_two_rates() -> Any:
    groups = [{"params": [nn.Parameter(flow.zeros(1))], "lr": rate} for rate in (BASE, BASE / 10)]
    return flow.optim.SGD([*groups, {"params": [nn.Parameter(flow.zeros(1))], "lr": 0.0}])


def test_groups_of_different_rates_warm_up_each_to_its_own_schedule() -> None:
    schedule = schedules.WarmupCosineLR(with_two_rates(), 20, 0.1, 5, alpha=0.01)
    expected = rates(schedules.WarmupCosineLR(optimizer(), 20, 0.1, 5, alpha=0.01), 20)
    for rate in expected:
        assert schedule.get_last_lr() == pytest.approx([rate, rate / 10, 0])
        schedule.step()


def test_different_rates_that_cannot_warm_up_linearly_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r'the shares \[0\.\d+, 1\.\d+\] of .* warmup_method="constant"'):
        schedules.WarmupPolynomialLR(with_two_rates(), 20, 0.1, 5, end_learning_rate=0.1)
    schedules.WarmupPolynomialLR(with_two_rates(), 20, 0.1, 5, end_learning_rate=0.1, warmup_method="constant")


@pytest.mark.parametrize("cut", [0, 3, 5, 6, 19])
def test_a_restored_schedule_goes_on_where_the_saved_one_stood(cut: int) -> None:
    whole = rates(schedules.WarmupCosineLR(optimizer(), 20, 0.1, 5), 20)
    saved = schedules.WarmupCosineLR(optimizer(), 20, 0.1, 5)
    rates(saved, cut)
    new_optimizer = optimizer()
    restored = schedules.WarmupCosineLR(new_optimizer, 20, 0.1, 5)
    ScheduleState(restored).load_state_dict(ScheduleState(saved).state_dict())
    assert new_optimizer.param_groups[0]["lr"] == whole[cut]
    assert rates(restored, 20 - cut) == whole[cut:]


class Halving:
    """The rate halves in each step, whatever its start: it cannot be computed from the step."""

    def __init__(self, optimizer: Any, may_save: bool = True) -> None:
        self.optimizer, self.last_step, self.rate = optimizer, 0, 1.0
        self.kept = {} if may_save else {"optimizer": optimizer}

    def step(self) -> None:
        self.last_step, self.rate = self.last_step + 1, self.rate / 2

    def get_last_lr(self) -> list[float]:
        return [self.rate]

    def state_dict(self) -> dict[str, Any]:
        return {"last_step": self.last_step, "rate": self.rate, **self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_step, self.rate = state["last_step"], state["rate"]


class Counting(flow.optim.lr_scheduler.ConstantLR):
    """Its rates depend on a number that OneFlow's schedules do not have."""

    calls = 0

    def get_lr(self, base_lr: float, step: int) -> float:
        self.calls += 1
        return base_lr / self.calls


class CountingElsewhere(flow.optim.lr_scheduler.ConstantLR):
    """As Counting, but no checkpoint can store the object that has the number."""

    def __init__(self, optimizer: Any) -> None:
        self.kept = SimpleNamespace(calls=0)
        super().__init__(optimizer)

    def get_lr(self, base_lr: float, step: int) -> float:
        self.kept.calls += 1
        return base_lr / self.kept.calls


def test_numbers_that_a_schedule_keeps_itself_are_restored(caplog: pytest.LogCaptureFixture) -> None:
    saved, new_optimizer = Counting(optimizer()), optimizer()
    state = ScheduleState(saved)
    rates(saved, 3)
    restored = Counting(new_optimizer)
    ScheduleState(restored).load_state_dict(json.loads(json.dumps(state.state_dict())))
    assert new_optimizer.param_groups[0]["lr"] == saved.get_last_lr()[0]
    assert rates(restored, 3) == rates(saved, 3)
    assert not caplog.records


@pytest.mark.parametrize("changed", ["number in a warm-up", "base rate", "rate of a group"])
def test_what_other_code_or_a_warmed_up_schedule_changes_is_restored(
    changed: str, caplog: pytest.LogCaptureFixture
) -> None:
    def made() -> Any:
        inner = Counting(optimizer()) if "warm-up" in changed else flow.optim.lr_scheduler.StepLR(optimizer(), 4)
        return flow.optim.lr_scheduler.WarmUpLR(inner, warmup_factor=0.5, warmup_iters=2, warmup_method="constant")

    saved, restored = made(), made()
    state = ScheduleState(saved)
    rates(saved, 3)
    if changed == "base rate":
        saved.base_lrs[0] /= 10
        saved.step()
    elif changed == "rate of a group":
        saved.optimizer.param_groups[0]["lr"] /= 10
    ScheduleState(restored).load_state_dict(json.loads(json.dumps(state.state_dict())))
    assert restored.optimizer.param_groups[0]["lr"] == saved.optimizer.param_groups[0]["lr"]
    assert rates(restored, 3) == rates(saved, 3)
    assert not caplog.records


def test_a_schedule_with_a_state_of_its_own_restores_it(caplog: pytest.LogCaptureFixture) -> None:
    saved = Halving(optimizer())
    rates(saved, 3)
    restored = Halving(optimizer())
    ScheduleState(restored).load_state_dict(ScheduleState(saved).state_dict())
    assert rates(restored, 3) == rates(saved, 3)
    assert not caplog.records
    with pytest.raises(TypeError, match="cannot store the state_dict of the schedule Halving"):
        ScheduleState(Halving(optimizer(), may_save=False))


def test_a_schedule_that_continues_with_another_rate_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    saved = CountingElsewhere(optimizer())
    rates(saved, 3)
    ScheduleState(CountingElsewhere(optimizer())).load_state_dict(ScheduleState(saved).state_dict())
    assert "continues with [0.25] instead of [0.125]. If optim" in caplog.text
    assert "CountingElsewhere has a state besides its step: give it state_dict and load_state_dict" in caplog.text
