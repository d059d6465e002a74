"""What the methods that build a trainer's parts must return. Subclasses override these methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from libai_data.config import try_get_key
from libai_data.data.attributes import has_attribute
from libai_data.engine.writers import EventWriter
from libai_data.errors import ConfigError, refusing_exit
from libai_data.errors.argument_rules import Rule, list_of
from libai_data.mesh.current import get_world_size
from libai_data.structures import DistTensorData, Instance


def _is_of_flow(kind: str, value: Any) -> bool:
    import oneflow as flow

    return isinstance(value, getattr(flow.nn, kind))


def _object_with(words: str, *names: str) -> Rule:
    return Rule(words, lambda value: not isinstance(value, type) and all(has_attribute(value, name) for name in names))


_OPTIMIZER = ("param_groups", "step", "zero_grad", "clip_grad", "_state")
_SCHEDULE = ("get_last_lr", "step", "last_step", "state_dict", "load_state_dict")
_RULES = {
    "build_model": Rule("the model, an oneflow.nn.Module", partial(_is_of_flow, "Module")),
    "build_graph": Rule("the graph, an oneflow.nn.Graph", partial(_is_of_flow, "Graph")),
    "build_optimizer": _object_with("an optimizer of OneFlow", *_OPTIMIZER),
    "build_lr_scheduler": _object_with(
        f"an object with {', '.join(_SCHEDULE)}, as most schedules of oneflow.optim.lr_scheduler are", *_SCHEDULE
    ),
    "build_hooks": Rule(
        "a list of hooks", lambda value: isinstance(value, Iterable) and not isinstance(value, (str, Mapping))
    ),
    "build_writers": list_of(EventWriter, "EventWriters ([] for none)"),
    "test": Rule("a dict of results ({} for none)", lambda value: isinstance(value, Mapping)),
}
_SECTIONS = {"build_model": "model", "build_optimizer": "optim", "build_lr_scheduler": "train.scheduler"}


def built_by(owner: Any, method: str, *arguments: Any, **named: Any) -> Any:
    """Call a method of a trainer or its class that builds a part; returns the part.

    Raises ConfigError if the method returned something else, or called `sys.exit`.
    """
    with refusing_exit(f"{method} of {getattr(owner, '__name__', type(owner).__name__)}"):
        part = getattr(owner, method)(*arguments, **named)
    check_part(part, method)
    return part


def built_evaluator(owner: Any, cfg: Any) -> Any:
    """What `build_evaluator` returns; raises ConfigError if it is None although the config has an evaluator."""
    evaluator = built_by(owner, "build_evaluator", cfg)
    if evaluator is None and try_get_key(cfg, "train.evaluation.evaluator") is not None:
        raise ConfigError(
            f"build_evaluator returned {_described(None)}, but the config has train.evaluation.evaluator; return an "
            "evaluator, or a list of them ([] for none)"
        )
    return evaluator


def check_part(part: Any, method: str) -> None:
    """Raise ConfigError if a method that builds a part of a trainer may not return this."""
    rule = _RULES.get(method)
    if rule is not None and not rule.accepts(part):
        section = f", by default the call at {_SECTIONS[method]} in the config," if method in _SECTIONS else ""
        raise ConfigError(f"{method}{section} returned {_described(part)}; it must return {rule.allowed}")


def check_fit(model: Any, optimizer: Any, schedule: Any) -> None:
    """Raise ConfigError if the optimizer or schedule is of another model, or if each rank has a model of its own."""
    local = [name for name, parameter in model.named_parameters() if not parameter.is_global]
    if local and get_world_size() > 1 and not getattr(model, "_is_ddp_module", False):
        raise ConfigError(
            f"build_model returned a model with local parameters, such as {local[0]!r}: each rank would train a model "
            "of its own. Make them global, by model._apply(convert_to_distributed_default_setting) of "
            "libai_data.mesh.current, or let oneflow.nn.parallel.DistributedDataParallel add up the gradients"
        )
    own = set(model.parameters())
    others = sum(parameter not in own for group in optimizer.param_groups for parameter in group.parameters)
    if others:
        raise ConfigError(
            f"build_optimizer returned an optimizer of {others} tensor(s) that are no parameters of the model, so it "
            "would not train the model; build it from the argument `model`"
        )
    _check_norms(model, optimizer)
    if getattr(schedule, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            "build_lr_scheduler returned a schedule of another optimizer; build it from the argument `optimizer`"
        )


def _check_norms(model: Any, optimizer: Any) -> None:
    """Raise ConfigError for LAMB with weights that ranks split: OneFlow 0.9 scales each part by the norm of this part.

    In graph mode, OneFlow aborts.
    """
    import oneflow as flow

    for name, each in model.named_parameters() if isinstance(optimizer, flow.optim.LAMB) else ():
        axes = zip(each.sbp, np.shape(each.placement.ranks)) if each.is_global else ()
        if any(sbp != flow.sbp.broadcast and size > 1 for sbp, size in axes):
            raise ConfigError(
                f"the optimizer is LAMB, and several ranks split {name!r}, as tensor parallelism does: each rank would "
                "scale its part by another norm than that of the whole weight. Use another optimizer, such as AdamW, "
                "or set train.dist.tensor_parallel_size=1"
            )


def as_three_loaders(built: Any) -> tuple[Any, Any, Any]:
    """The result of `build_train_loader` as (train, validation, test); a ConfigError if this is not clear."""
    is_three = isinstance(built, (tuple, list)) and len(built) == 3
    if isinstance(built, tuple) and not is_three:
        raise ConfigError(
            f"build_train_loader returned a tuple of {len(built)}; return a train loader, or a tuple of train, "
            "validation and test loader, of which the last two may be None"
        )
    if is_three and isinstance(built, list) and all(map(_is_no_loader, built)):
        is_three = False  # a train loader with three batches
    for each in built if is_three else ():
        if _is_no_loader(each) or (isinstance(built, list) and _are_arrays(each)):
            raise ConfigError(
                f"build_train_loader returned a {type(built).__name__} of three, in which {_described(each)} may be a "
                "batch. To give three loaders, return a tuple (train, validation, test) of iterables of batches; to "
                "train on a list of batches, return (batches, None, None)"
            )
    train, validation, test = built if is_three else (built, None, None)
    if train is None:
        raise ConfigError("build_train_loader returned no train loader, but None (is a `return` missing?)")
    if not _is_iterable(train):
        raise ConfigError(f"build_train_loader returned {_described(train)}; return an iterable of batches")
    return train, validation, test


def as_test_loaders(built: Any) -> list[Any]:
    """The result of `build_test_loader` as a list; raises ConfigError if it is neither a list of loaders nor None."""
    if built is None:
        return []
    found = "" if isinstance(built, (tuple, list)) else _described(built)
    for each in () if found else built:
        if each is None or _is_no_loader(each):
            found = f"a list with {'None' if each is None else _described(each)}"
    if found:
        raise ConfigError(f"build_test_loader returned {found}; return a list of loaders, such as [loader]")
    return list(built)


def is_batch(part: Any) -> bool:
    """Whether an object is surely a batch, and no loader: a mapping, an Instance, an array, or a tuple of arrays."""
    is_values = isinstance(part, tuple) and _are_arrays(part)
    return is_values or _is_array(part) or isinstance(part, (Mapping, Instance))


def _is_no_loader(part: Any) -> bool:
    return part is not None and (is_batch(part) or not _is_iterable(part))


def _are_arrays(part: Any) -> bool:
    """Whether a part is a list of arrays: a batch, or a loader whose batches are bare arrays."""
    return isinstance(part, (list, tuple)) and bool(part) and all(map(_is_array, part))


def _is_array(value: Any) -> bool:
    # A dataset may have a shape, too.
    has_both = has_attribute(value, "shape") and has_attribute(value, "dtype")
    return has_both or isinstance(value, DistTensorData)


def _is_iterable(loader: Any) -> bool:
    is_other = isinstance(loader, (str, bytes, type, Mapping, Instance))
    return not is_other and (has_attribute(loader, "__iter__") or has_attribute(loader, "__getitem__"))


def _described(value: Any) -> str:
    if value is None:
        return "None (is a `return` missing?)"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
