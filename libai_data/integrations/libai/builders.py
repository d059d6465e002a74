"""`build_*_loader` for configs of LiBai: LiBai's arguments, this package's loaders."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import wraps
from typing import Any, Callable

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from libai_data.delivery import build
from libai_data.integrations.libai.loader import LiBaiLoader
from libai_data.loader.collate import trivial_batch_collator

logger = logging.getLogger(__name__)

_BUILDERS = (
    "build_image_test_loader",
    "build_image_train_loader",
    "build_nlp_test_loader",
    "build_nlp_train_loader",
    "build_nlp_train_val_test_loader",
)
_PACKAGE = __name__.rpartition(".")[0]
_TARGET = "_target_"
_DEFERRED = "_deferred_target_"
"""This key replaces `_target_` in a section, so that LiBai does not instantiate the section."""

_SAMPLERS = ("sampler", "train_sampler", "test_sampler")
# Arguments that LiBai passes to OneFlow's DataLoader. They have no effect here, because workers persist and share their
# memory with the trainer.
_IGNORED = ("multiprocessing_context", "persistent_workers", "pin_memory", "prefetch_factor")


def _for_libai(builder: Callable[..., Any]) -> Callable[..., Any]:
    """The same builder, but with LiBai's arguments; it returns its loaders as `LiBaiLoader`."""

    @wraps(builder)
    def build_for_libai(*args: Any, **arguments: Any) -> Any:
        if builder is build.build_nlp_train_val_test_loader and not args:
            arguments.setdefault("train_val_test_num_samples", None)
        built = builder(*args, **_translated(arguments))
        if isinstance(built, tuple):
            return tuple(None if loader is None else LiBaiLoader(loader) for loader in built)
        return LiBaiLoader(built)

    build_for_libai.__module__ = _PACKAGE  # The public place, for errors and saved configs.
    return build_for_libai


build_image_test_loader = _for_libai(build.build_image_test_loader)
build_nlp_test_loader = _for_libai(build.build_nlp_test_loader)
build_nlp_train_loader = _for_libai(build.build_nlp_train_loader)
build_image_train_loader = _for_libai(build.build_image_train_loader)
build_nlp_train_val_test_loader = _for_libai(build.build_nlp_train_val_test_loader)


class DataPipeline:
    """A base class for your trainer, listed before LiBai's trainer; the config may then name LiBai's builders.

    ::

        class Trainer(DataPipeline, DefaultTrainer): ...

    LiBai's builders in the config are replaced by this package's builders of the same name. The config may also set
    their further arguments (`readers`, `layouts`, `prefetch`, `on_error`, ...). Only ranks that read a dataset make it.
    A builder that is not LiBai's is called unchanged.

    Raises:
        TypeError: A trainer of LiBai is listed first, whose methods would be called instead.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for base in cls.__mro__[: cls.__mro__.index(DataPipeline)]:
            if base.__module__.partition(".")[0] == "libai" and not issubclass(base, DataPipeline):
                raise TypeError(
                    f"{cls.__name__} lists LiBai's {base.__name__} before DataPipeline, whose loaders would not be "
                    f"used; write class {cls.__name__}(DataPipeline, {base.__name__})"
                )

    @classmethod
    def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        """LiBai's method, with this package's builder."""
        with _our_builders([cfg.dataloader.train]):
            return super().build_train_loader(cfg, tokenizer)  # type: ignore[misc]

    @classmethod
    def build_test_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        """LiBai's method, with this package's builders."""
        with _our_builders(list(cfg.dataloader.get("test") or [])):
            return super().build_test_loader(cfg, tokenizer)  # type: ignore[misc]


@contextmanager
def _our_builders(sections: list[Any]) -> Iterator[None]:
    changed = []
    for section in sections:
        target = section.get(_TARGET)
        name = target.rpartition(".")[2] if isinstance(target, str) else getattr(target, "__name__", "")
        if _is_of_libai(target, _BUILDERS):
            section[_TARGET] = f"libai_data.integrations.libai.{name}"
        elif getattr(target, "__module__", str(target)).partition(".")[0] != "libai_data":
            logger.warning("%s is not a builder of LiBai. It is called unchanged, and its data do not resume.", target)
            continue
        changed.append(section)
    # LiBai must not instantiate these sections. The builder does this, on the ranks that need the objects.
    made_later = [(section, name) for section in changed for name in ("dataset", *_SAMPLERS)]
    for section, name in made_later:
        _rename(section.get(name), _TARGET, _DEFERRED)
    try:
        yield
    finally:
        for section, name in made_later:
            _rename(section.get(name), _DEFERRED, _TARGET)


def _translated(arguments: dict[str, Any]) -> dict[str, Any]:
    """LiBai's arguments as this package's arguments: a sampler of None is left out; LiBai's classes are replaced."""
    translated = {}
    for name, value in arguments.items():
        if name in _IGNORED:
            logger.info("%s=%r is ignored: it has no effect on the loaders of libai_data.", name, value)
        elif name in _SAMPLERS:
            if value is not None:
                translated[name] = _own_sampler(_undeferred(value))
        elif name == "dataset":
            translated[name] = _undeferred(value)
        elif name == "collate_fn" and _is_of_libai(value, ("trivial_batch_collator",)):
            translated[name] = trivial_batch_collator
        else:
            translated[name] = value
    return translated


def _is_of_libai(target: Any, names: Any) -> bool:
    """Whether a callable, or the callable of a dotted name, belongs to LiBai and has one of these names."""
    path = (
        target if isinstance(target, str) else f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', '')}"
    )
    return path.startswith("libai.") and path.rpartition(".")[2] in names


def _own_sampler(sampler: Any) -> Any:
    """The config of a sampler; LiBai's two samplers, which have no state, are replaced by this package's samplers."""
    if not (isinstance(sampler, DictConfig) and _TARGET in sampler):
        return sampler
    target = sampler[_TARGET]
    if _is_of_libai(target, ("CyclicSampler", "SingleRoundSampler")):
        name = target.rpartition(".")[2] if isinstance(target, str) else target.__name__
        sampler = deepcopy(sampler)
        sampler[_TARGET] = f"libai_data.data.samplers.{name}"
    return sampler


def _undeferred(value: Any) -> Any:
    if not OmegaConf.is_config(value):
        return value
    value = deepcopy(value)
    _rename(value, _DEFERRED, _TARGET)
    return value


def _rename(value: Any, old: str, new: str) -> None:
    for each in value if isinstance(value, ListConfig) else [value]:
        if isinstance(each, DictConfig) and old in each:
            with open_dict(each):
                each[new] = each.pop(old)
