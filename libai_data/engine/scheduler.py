"""Learning rates over the steps of a training, made of OneFlow's own schedules. LiBai's names and arguments.

All begin with a warm-up of `warmup_iter` steps. It begins at `warmup_factor` times the base rate. The rate changes
linearly to the schedule's rate after the warm-up (`warmup_method="linear"`), or stays the same ("constant").
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from libai_data.config import instantiate
from libai_data.data.attributes import call_if_there
from libai_data.engine.checkpoint.changed_attributes import ChangedAttributes
from libai_data.engine.data_state import PlainState, has_state
from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import FLAG, INT, MAPPING, Rule, check, each, one_of, real, several, whole
from libai_data.errors.saved_state import Keys, check_state

logger = logging.getLogger(__name__)

_RULES = {
    "max_iter": INT,
    "warmup_iter": INT,
    "warmup_factor": real(0, 1),
    "warmup_method": one_of("linear", "constant"),
    "alpha": real(0, 1),
    "eta_min": real(0, 1e9),
    "gamma": real(0, 1e9),
    "step_size": whole(1),
    "end_learning_rate": real(0, 1e9),
    "power": real(0, 1e9),
    "cycle": FLAG,
    "milestones": Rule(
        "a list of steps, ints of at least 0, each above the one before it",
        lambda steps: several(whole(0)).accepts(steps) and all(np.diff([*steps]) > 0),
    ),
}


def build_lr_scheduler(cfg: Any, optimizer: Any) -> Any:
    """Build the schedule that `cfg.train.scheduler` describes; its `optimizer` is filled in."""
    return instantiate(cfg, optimizer=optimizer)


def WarmupCosineLR(
    optimizer: Any,
    max_iter: int,
    warmup_factor: float,
    warmup_iter: int,
    alpha: float = 0.0,
    warmup_method: str = "linear",
) -> Any:
    """A cosine from the base rate to `alpha` times it at step `max_iter`."""
    return _warmed_up("CosineDecayLR", locals(), decay_steps=max_iter, alpha=alpha)


def WarmupCosineAnnealingLR(
    optimizer: Any,
    max_iter: int,
    warmup_factor: float,
    warmup_iter: int,
    eta_min: float = 0.0,
    warmup_method: str = "linear",
) -> Any:
    """A cosine from the base rate to the rate `eta_min` at step `max_iter`."""
    return _warmed_up("CosineAnnealingLR", locals(), T_max=max_iter, eta_min=eta_min)


def WarmupStepLR(
    optimizer: Any,
    max_iter: int,
    warmup_factor: float,
    warmup_iter: int,
    step_size: int,
    gamma: float = 0.1,
    warmup_method: str = "linear",
) -> Any:
    """Multiplies the rate by `gamma` every `step_size` steps."""
    return _warmed_up("StepLR", locals(), step_size=step_size, gamma=gamma)


def WarmupMultiStepLR(
    optimizer: Any,
    max_iter: int,
    warmup_factor: float,
    warmup_iter: int,
    milestones: list[int],
    gamma: float = 0.1,
    warmup_method: str = "linear",
) -> Any:
    """Multiplies the rate by `gamma` at each of the steps `milestones`."""
    check(_RULES, milestones=milestones)
    return _warmed_up("MultiStepLR", locals(), milestones=list(milestones), gamma=gamma)


def WarmupExponentialLR(
    optimizer: Any,
    max_iter: int,
    gamma: float,
    warmup_factor: float,
    warmup_iter: int,
    warmup_method: str = "linear",
) -> Any:
    """Multiplies the rate by `gamma` in each step."""
    return _warmed_up("ExponentialLR", locals(), gamma=gamma)


def WarmupPolynomialLR(
    optimizer: Any,
    max_iter: int,
    warmup_factor: float,
    warmup_iter: int,
    end_learning_rate: float = 0.0001,
    power: float = 1.0,
    cycle: bool = False,
    warmup_method: str = "linear",
) -> Any:
    """A polynomial of degree `power` from the base rate to `end_learning_rate` at step `max_iter`."""
    return _warmed_up(
        "PolynomialLR", locals(), decay_batch=max_iter, end_learning_rate=end_learning_rate, power=power, cycle=cycle
    )


def _warmed_up(schedule: str, given: Mapping[str, Any], **arguments: Any) -> Any:
    """OneFlow's schedule of this name and with these arguments, after the warm-up that `given` describes."""
    check(_RULES, **given)
    max_iter, warmup_iter = given["max_iter"], given["warmup_iter"]
    if not 0 <= warmup_iter <= max_iter:
        raise ConfigError(
            f"warmup_iter is {warmup_iter}, and max_iter {max_iter}; the warm-up needs at least 0 steps and at most all"
        )
    from oneflow.optim import lr_scheduler

    optimizer, factor = given["optimizer"], given["warmup_factor"]
    made = getattr(lr_scheduler, schedule)(optimizer, **arguments)
    if warmup_iter == 0:
        return made
    method, rates = given["warmup_method"], made.base_lrs
    if method == "constant" or np.isclose(rates, rates[0]).all():
        return lr_scheduler.WarmUpLR(made, warmup_factor=factor, warmup_iters=warmup_iter, warmup_method=method)
    # As `WarmUpLR`, which refuses different rates.
    shares = [made.get_lr(rate, warmup_iter) / rate for rate in rates if rate]
    if not np.allclose(shares, shares[0]):
        raise ConfigError(
            f"after the warm-up, the groups of the optimizer have the shares {shares} of their rates, but a linear "
            'warm-up ends at the same share for all. Set warmup_method="constant", give the groups the same rate, or '
            "use a schedule that only multiplies the rates, such as WarmupCosineLR"
        )
    warm_up = lr_scheduler.LinearLR(optimizer, factor, shares[0], warmup_iter)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, made], [warmup_iter])


_SAVED = Keys(
    {"last_step": whole(0)},
    {
        "lr": each(real(-1e308, 1e308)),
        "group_lr": each(real(-1e308, 1e308)),
        "own": MAPPING,
        "attributes": MAPPING,
    },
    others=True,
)


class ScheduleState:
    """The state of a schedule for checkpoints: only the step, because the config describes the schedule.

    So eager and graph mode agree after a resume, and a larger `train.train_iter` can prolong a training. A schedule of
    a user's class that defines `state_dict` and `load_state_dict` restores itself. Of other schedules, also those in a
    `WarmUpLR`, the attributes that have changed since the start are restored too; so are rates that other code sets.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        module = getattr(getattr(type(scheduler), "state_dict", None), "__module__", "oneflow")
        is_own = has_state(scheduler) and module.partition(".")[0] != "oneflow"
        kind, attributes = type(scheduler).__name__, partial(_attributes_of, scheduler)
        besides = ("optimizer", "schedulers", "last_step", "_last_lr")
        self._key = "own" if is_own else "attributes"  # under which the state besides the step is stored
        self._more: Any = PlainState(scheduler) if is_own else ChangedAttributes(kind, attributes, besides)
        call_if_there(self._more, "check", f"schedule {kind}")

    def note_start(self) -> None:
        """Before the first step: compare the attributes with their present values."""
        call_if_there(self._more, "note_start")

    def state_dict(self) -> dict[str, Any]:
        state = {"last_step": self._scheduler.last_step, "lr": [float(rate) for rate in self._scheduler.get_last_lr()]}
        rates = [float(group["lr"]) for group in self._groups()]
        if rates != state["lr"]:
            state["group_lr"] = rates
        return {**state, self._key: self._more.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; warn if the learning rate is another one than before."""
        check_state(state, _SAVED, "a schedule", "lr_scheduler", "the checkpoint")
        if self._key == "own" and "own" in state:
            self._more.load_state_dict(state["own"])
        elif self._key == "attributes" and state.get("attributes") and "lr" in state:
            self._more.load_state_dict(state["attributes"])
            self._scheduler.last_step = state["last_step"]
            # Instead of a step, which would change the attributes.
            self._set_rates(state["lr"])
            self._scheduler._last_lr = list(state["lr"])
        else:
            self._scheduler.last_step = state["last_step"] - 1
            self._scheduler.step()
        self._set_rates(state.get("group_lr", ()))
        rates = self.state_dict()["lr"]
        if "lr" in state and rates != state["lr"]:
            logger.warning(
                "The learning rate continues with %s instead of %s. If optim, train.scheduler and train.train_iter are "
                "as before, %s has a state besides its step: give it state_dict and load_state_dict.",
                rates,
                state["lr"],
                type(self._scheduler).__name__,
            )

    def _groups(self) -> Any:
        return getattr(getattr(self._scheduler, "optimizer", None), "param_groups", ())

    def _set_rates(self, rates: Iterable[float]) -> None:
        for group, rate in zip(self._groups(), rates):
            group["lr"] = rate


def _attributes_of(scheduler: Any, name: str = "") -> dict[str, dict[str, Any]]:
    """Name -> attributes, of a schedule and of those in it."""
    found = {name: getattr(scheduler, "__dict__", {})}
    for number, inner in enumerate(found[name].get("schedulers", ())):
        found.update(_attributes_of(inner, f"{name}schedulers[{number}]"))
    return found
