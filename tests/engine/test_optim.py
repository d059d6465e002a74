from __future__ import annotations

from typing import Any

import oneflow as flow
import pytest
from oneflow import nn

from libai_data.config import LazyCall
from libai_data.engine.optim import build_optimizer, get_default_optimizer_params
from libai_data.errors import ConfigError


class OwnNorm(nn.Module):
    """A normalization layer that is not OneFlow's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(flow.ones(2))


@pytest.fixture()
def model() -> Any:
    model = nn.Module()
    model.linear = nn.Linear(2, 2)
    model.norm = OwnNorm()
    model.batch_norm = nn.BatchNorm1d(2)
    model.pos_embed = nn.Parameter(flow.zeros(2))
    return model


def names_by_option(model: Any, groups: Any, option: str) -> dict:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: group.get(option) for group in groups for parameter in group["params"]}


def test_parameters_are_grouped_by_how_they_are_optimized(model: Any) -> None:
    overrides = {"pos_embed": {"weight_decay": 0.2, "lr": 1.0}}
    groups = get_default_optimizer_params(model, weight_decay_norm=0.0, weight_decay_bias=0.1, overrides=overrides)
    assert list(overrides) == ["pos_embed"]
    assert names_by_option(model, groups, "weight_decay") == {
        "linear.weight": None,
        "linear.bias": 0.1,
        "norm.scale": 0.0,
        "batch_norm.weight": 0.0,
        "batch_norm.bias": 0.1,
        "pos_embed": 0.2,
    }
    assert len(groups) == 4


def test_an_override_may_be_a_list_as_betas_in_json_are(model: Any) -> None:
    groups = get_default_optimizer_params(model, overrides={"bias": {"betas": [0.8, 0.9]}})
    betas = names_by_option(model, groups, "betas")
    assert (len(groups), betas["linear.bias"], betas["batch_norm.bias"], betas["linear.weight"]) == (
        2,
        [0.8, 0.9],
        [0.8, 0.9],
        None,
    )


@pytest.mark.parametrize("name", ["pos_embd", "encoder.pos_embed"])
def test_an_override_of_no_parameter_is_refused_with_the_nearest(model: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"overrides has '{name}', but no parameter .* Did you mean 'pos_embed'"):
        get_default_optimizer_params(model, overrides={name: {"weight_decay": 0.0}})


def test_an_option_that_the_optimizer_does_not_read_is_warned_of(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    def built(option: str) -> Any:
        params = LazyCall(get_default_optimizer_params)(
            overrides={"pos_embed": {option: 0.5}}, clip_grad_max_norm=1.0, clip_grad_norm_type=2.0
        )
        return build_optimizer(LazyCall(flow.optim.AdamW)(params=params, lr=0.1), model)

    built("weight_decay")
    assert not caplog.records
    built("weigth_decay")
    assert (
        "'weigth_decay', which AdamW does not read. Did you mean 'weight_decay'? It has an effect only" in caplog.text
    )


def test_every_group_clips_if_a_norm_is_given(model: Any) -> None:
    groups = get_default_optimizer_params(model, clip_grad_max_norm=1.0, clip_grad_norm_type=2.0, weight_decay_bias=0.0)
    assert {group["clip_grad_max_norm"] for group in groups} == {1.0}
    with pytest.raises(ConfigError, match=r"clip_grad_max_norm 1.0 .* give both, or neither"):
        get_default_optimizer_params(model, clip_grad_max_norm=1.0)
    with pytest.raises(ConfigError, match=r"clip_grad_norm_type 2.0; give both, or neither"):
        get_default_optimizer_params(model, clip_grad_norm_type=2.0)


def test_frozen_and_shared_parameters_are_taken_once_or_not_at_all(model: Any) -> None:
    model.tied = model.linear
    model.pos_embed.requires_grad = False
    groups = get_default_optimizer_params(model)
    assert sorted(names_by_option(model, groups, "lr")) == [
        "batch_norm.bias",
        "batch_norm.weight",
        "linear.bias",
        "linear.weight",
        "norm.scale",
    ]
    assert sum(len(group["params"]) for group in groups) == 5


def test_biases_that_are_overridden_twice_and_a_frozen_model_are_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="bias"):
        get_default_optimizer_params(model, weight_decay_bias=0.0, overrides={"bias": {"lr": 1.0}})
    for parameter in model.parameters():
        parameter.requires_grad = False
    with pytest.raises(ConfigError, match="frozen"):
        get_default_optimizer_params(model)


def test_an_optimizer_is_built_from_its_config_and_leaves_no_model_in_it(model: Any) -> None:
    cfg = LazyCall(flow.optim.AdamW)(params=LazyCall(get_default_optimizer_params)(weight_decay_bias=0.0), lr=0.25)
    optimizer = build_optimizer(cfg, model)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    assert "model" not in cfg.params
