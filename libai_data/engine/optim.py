"""Build the optimizer, and group parameters by their options."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import inf
from typing import Any

from libai_data.config import instantiate, try_get_key
from libai_data.config.keys import join_path, path_of
from libai_data.config.signatures import check_is_call
from libai_data.errors import ConfigError, nearest
from libai_data.errors.argument_rules import check, or_none, real

logger = logging.getLogger(__name__)

_RULES = dict.fromkeys(("base_lr", "weight_decay", "weight_decay_norm", "weight_decay_bias"), or_none(real(0, 1e9)))
_CLIPS = ("clip_grad_max_norm", "clip_grad_norm_type")
_RULES.update(dict.fromkeys(_CLIPS, or_none(real(0, inf))))


def build_optimizer(cfg: Any, model: Any) -> Any:
    """Build the optimizer that `cfg.optim` describes; its `params` is called with the model.

    The log warns of options of groups that the optimizer does not have.
    """
    params = try_get_key(cfg, "params")
    check_is_call(params, join_path(path_of(cfg), "params"))
    optimizer = instantiate(cfg, params=instantiate(params, model=model))
    known = {**getattr(optimizer, "_default_options", {}), **dict.fromkeys(_CLIPS)}
    options = {name for group in getattr(optimizer, "param_groups", ()) for name in group.options}
    for name in sorted(options - known.keys()):
        logger.warning(
            f"A group of parameters has the option {name!r}, which {type(optimizer).__name__} does not "
            f"read.{nearest(name, known)} It has an effect only if other code reads it."
        )
    return optimizer


def get_default_optimizer_params(
    model: Any,
    base_lr: float | None = None,
    weight_decay: float | None = None,
    weight_decay_norm: float | None = None,
    weight_decay_bias: float | None = None,
    clip_grad_max_norm: float | None = None,
    clip_grad_norm_type: float | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Group a model's parameters by how they are optimized, in as few groups as possible. LiBai's arguments.

    Args:
        base_lr: learning rate; by default the optimizer's.
        weight_decay: by default the optimizer's.
        weight_decay_norm: for the parameters of normalization layers.
        weight_decay_bias: for parameters called "bias".
        clip_grad_max_norm: the norm of each group's gradients is clipped to this.
        clip_grad_norm_type: the norm's power; both or neither must be given.
        overrides: other options for the parameters with this own name (the last part of the whole name), such as
            ``{"pos_embed": {"weight_decay": 0.0}}``.

    Raises:
        ConfigError: An argument is out of range, biases are overridden twice, no parameter has the name of an override,
            or no parameter is trainable.
    """
    check(_RULES, **locals())
    special = {name: dict(options) for name, options in (overrides or {}).items()}
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    for name in special.keys() - names:
        raise ConfigError(
            f"optim.params.overrides has {name!r}, but no parameter of the model has this own name, which is the last "
            f"part of the whole name.{nearest(name.rpartition('.')[2], names)} The names are {sorted(names)}"
        )
    if weight_decay_bias is not None:
        if "bias" in special:
            raise ConfigError("optim.params sets weight_decay_bias, and overrides 'bias' too; use one of them")
        special["bias"] = {"weight_decay": weight_decay_bias}
    if (clip_grad_max_norm is None) != (clip_grad_norm_type is None):
        raise ConfigError(
            f"optim.params has clip_grad_max_norm {clip_grad_max_norm} and clip_grad_norm_type {clip_grad_norm_type}; "
            "give both, or neither"
        )
    given = {
        "lr": base_lr,
        "weight_decay": weight_decay,
        "clip_grad_max_norm": clip_grad_max_norm,
        "clip_grad_norm_type": clip_grad_norm_type,
    }
    defaults: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    groups: dict[str, dict[str, Any]] = {}
    seen = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            options = dict(defaults)
            if weight_decay_norm is not None and is_normalization(module):
                options["weight_decay"] = weight_decay_norm
            options.update(special.get(name, {}))
            groups.setdefault(repr(options), {**options, "params": []})["params"].append(parameter)
    if not groups:
        raise ConfigError("the model has no parameter that is trained; is everything frozen?")
    return [*groups.values()]


def complete_state(optimizer: Any) -> None:
    """Make the state of added parameters, which OneFlow 0.9 makes in the constructors of two optimizers only."""
    import oneflow as flow

    for kind in (flow.optim.Adagrad, flow.optim.Adadelta):
        for group in optimizer.param_groups if isinstance(optimizer, kind) else ():
            for parameter in group.parameters:
                if not optimizer._state[parameter]:
                    optimizer._state[parameter] = kind([{**group.options, "params": [parameter]}])._state[parameter]


def is_normalization(module: Any) -> bool:
    """Whether a module is a normalization layer: one of OneFlow's, or a class with "norm" in its name."""
    from oneflow import nn

    own: tuple[type, ...] = (nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    own += (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
    return isinstance(module, own) or "norm" in type(module).__name__.lower()
