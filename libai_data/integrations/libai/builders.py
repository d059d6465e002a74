"""`build_*_loader` for configs of LiBai: LiBai's arguments, this package's loaders."""

from __future__ import annotations

import logging
from copy import deepcopy
from functools import wraps
from typing import Any, Callable

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from libai_data.delivery import build
from libai_data.integrations.libai.loader import LiBaiLoader
from libai_data.loader.collate import trivial_batch_collator

logger = logging.getLogger(__name__)

BUILDERS = (
    "build_image_test_loader",
    "build_image_train_loader",
    "build_nlp_test_loader",
    "build_nlp_train_loader",
    "build_nlp_train_val_test_loader",
)
TARGET = "_target_"
DEFERRED = "_deferred_target_"
"""What stands for `_target_` in a section that LiBai is to hand over as it is."""

_SAMPLERS = ("sampler", "train_sampler", "test_sampler")
# Arguments of OneFlow's DataLoader that LiBai hands on, and that say nothing about a loader whose workers live on and
# share their memory with the trainer.
_WITHOUT_MEANING = ("multiprocessing_context", "persistent_workers", "pin_memory", "prefetch_factor")


def _for_libai(builder: Callable[..., Any]) -> Callable[..., Any]:
    """The same builder, with LiBai's arguments, its loaders as `LiBaiLoader`."""

    @wraps(builder)
    def build_for_libai(*args: Any, **arguments: Any) -> Any:
        if builder is build.build_nlp_train_val_test_loader and not args:
            arguments.setdefault("train_val_test_num_samples", None)
        built = builder(*args, **_translated(arguments))
        if isinstance(built, tuple):
            return tuple(None if loader is None else LiBaiLoader(loader) for loader in built)
        return LiBaiLoader(built)

    return build_for_libai


build_image_test_loader = _for_libai(build.build_image_test_loader)
build_nlp_test_loader = _for_libai(build.build_nlp_test_loader)
build_nlp_train_loader = _for_libai(build.build_nlp_train_loader)
build_image_train_loader = build_nlp_train_loader
build_nlp_train_val_test_loader = _for_libai(build.build_nlp_train_val_test_loader)


def _translated(arguments: dict[str, Any]) -> dict[str, Any]:
    """LiBai's arguments as ours: None for a sampler or a collator is the default, and its classes are ours."""
    translated = {}
    for name, value in arguments.items():
        if name in _WITHOUT_MEANING:
            logger.info("%s=%r is left out: it says nothing about the loaders of libai_data.", name, value)
        elif name in _SAMPLERS:
            if value is not None:
                translated[name] = _own_sampler(_undeferred(value))
        elif name == "dataset":
            translated[name] = _undeferred(value)
        elif name == "collate_fn" and is_of_libai(value, ("trivial_batch_collator",)):
            translated[name] = trivial_batch_collator
        else:
            translated[name] = value
    return translated


def is_of_libai(target: Any, names: Any) -> bool:
    """Whether a callable, or the dotted name of one, is LiBai's and has one of these names."""
    path = (
        target if isinstance(target, str) else f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', '')}"
    )
    return path.startswith("libai.") and path.rpartition(".")[2] in names


def _own_sampler(sampler: Any) -> Any:
    """The config of a sampler; of one of LiBai's two, which know no state, the config of ours."""
    if not (isinstance(sampler, DictConfig) and TARGET in sampler):
        return sampler
    target = sampler[TARGET]
    if is_of_libai(target, ("CyclicSampler", "SingleRoundSampler")):
        name = target.rpartition(".")[2] if isinstance(target, str) else target.__name__
        sampler = deepcopy(sampler)
        sampler[TARGET] = f"libai_data.data.samplers.{name}"
    return sampler


def defer(section: DictConfig, name: str) -> None:
    """Keep LiBai from making what a section's argument describes; the builder does, where it is needed."""
    _rename(section.get(name), TARGET, DEFERRED)


def undefer(section: DictConfig, name: str) -> None:
    """The inverse of `defer`."""
    _rename(section.get(name), DEFERRED, TARGET)


def _undeferred(value: Any) -> Any:
    if not OmegaConf.is_config(value):
        return value
    value = deepcopy(value)
    _rename(value, DEFERRED, TARGET)
    return value


def _rename(value: Any, old: str, new: str) -> None:
    for each in value if isinstance(value, ListConfig) else [value]:
        if isinstance(each, DictConfig) and old in each:
            with open_dict(each):
                each[new] = each.pop(old)
