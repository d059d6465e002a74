from __future__ import annotations

import math
from typing import Any

import oneflow as flow
import pytest
from oneflow import nn

from libai_data.engine import scheduler as schedules
from libai_data.engine.scheduler import ScheduleState

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
