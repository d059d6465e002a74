"""A key that a callable accepts by `**kwargs` and never reads is refused; one that it may read is not."""

from __future__ import annotations

import functools
from typing import Any, Callable

import pytest

from libai_data.config import LazyCall, check_targets, instantiate
from libai_data.errors import ConfigError


class Base:
    def __init__(self, depth: int = 1, **kwargs: Any) -> None:
        self.heads = kwargs.get("heads", 4)
        self.width = kwargs.pop("width", 8)
        self.size = None if "size" not in kwargs else kwargs["size"]  # noqa: SIM401


class Derived(Base):
    def __init__(self, dim: int = 2, **options: Any) -> None:
        super().__init__(depth=dim, **options)


class Plain(Derived):
    pass


class Deaf:
    def __init__(self, dim: int = 2, **kwargs: Any) -> None:
        self.dim = dim


def deaf(dim: int = 2, **kwargs: Any) -> int:
    return dim


@pytest.mark.parametrize(
    ("target", "key", "hint"),
    [
        (Deaf, "dimm", "Did you mean 'dim'?"),
        (deaf, "dimm", "Did you mean 'dim'?"),
        (Base, "head", "Did you mean 'heads'?"),
        (Derived, "sise", "Did you mean 'size'?"),
        (Plain, "widht", "Did you mean 'width'?"),
        (Deaf, "xyz", "It reads: dim."),
    ],
)
def test_a_key_that_nothing_reads_is_refused_by_its_path(target: Callable[..., Any], key: str, hint: str) -> None:
    cfg = LazyCall(dict)(inner=LazyCall(target)(**{key: 3}))
    for refuse in (check_targets, instantiate):
        with pytest.raises(ConfigError, match=rf"inner\.{key}: .*{target.__name__}.* never reads it\. ") as refused:
            refuse(cfg)
        assert hint in str(refused.value)


@pytest.mark.parametrize("key", ["depth", "heads", "width", "size", "dim"])
def test_a_key_that_is_read_by_its_name_or_by_a_base_class_is_accepted(key: str) -> None:
    target = Plain if key != "depth" else Base
    assert isinstance(instantiate(LazyCall(target)(**{key: 3})), Base)


def reads_by_variable(**kwargs: Any) -> Any:
    return [kwargs.get(name) for name in ("anything",)]


def passes_on(**kwargs: Any) -> Any:
    return dict(**kwargs)


def reads_locals(**kwargs: Any) -> Any:
    return locals()["kwargs"]


class Wrapped:
    @functools.wraps(deaf)  # type: ignore[misc]
    def __init__(self, **kwargs: Any) -> None:
        self.all = kwargs


class ByClassName(Base):
    def __init__(self, **kwargs: Any) -> None:
        Base.__init__(self, **kwargs)


class Made:
    def __new__(cls, **kwargs: Any) -> Any:
        return kwargs


@pytest.mark.parametrize(
    "target", [reads_by_variable, passes_on, reads_locals, Wrapped, ByClassName, Made, functools.partial(deaf), dict]
)
def test_a_callable_that_may_read_any_key_gets_it(target: Callable[..., Any]) -> None:
    instantiate(LazyCall(target)(anything=3))


def test_what_the_trainer_adds_may_be_ignored() -> None:
    assert instantiate(LazyCall(deaf)(dim=3), tokenizer=None) == 3


class Sectioned:
    def __init__(self, cfg: Any, scale: float = 1.0) -> None:
        self.width = cfg.hidden_size * scale
        self.layers = cfg["num_layers"] if "num_layers" in cfg else cfg.get("layers", 2)
        self.rate = cfg.dropout.rate


def reads_section(cfg: Any) -> Any:
    return cfg.hidden_size


class KeepsSection:
    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg


def hands_section_on(cfg: Any) -> Any:
    return reads_section(cfg)


def asks_section(cfg: Any) -> Any:
    return getattr(cfg, "hidden_size", 0) + len(cfg.keys())


@pytest.mark.parametrize("target", [Sectioned, reads_section])
def test_a_key_of_a_section_that_nothing_reads_is_refused_by_its_path(target: Callable[..., Any]) -> None:
    cfg = LazyCall(dict)(model=LazyCall(target)(cfg={"hiden_size": 3}))
    for refuse in (check_targets, instantiate):
        with pytest.raises(
            ConfigError, match=r"model\.cfg\.hiden_size: .* never reads the key 'hiden_size' of its argument 'cfg'\. "
        ) as refused:
            refuse(cfg)
        assert "Did you mean 'hidden_size'?" in str(refused.value)


def test_keys_of_a_section_that_are_read_in_any_way_are_accepted() -> None:
    section = {"hidden_size": 8, "num_layers": 2, "layers": 3, "dropout": {"rate": 0.1}}
    assert instantiate(LazyCall(Sectioned)(cfg=section, scale=2.0)).width == 16


@pytest.mark.parametrize("target", [KeepsSection, hands_section_on, asks_section, dict])
def test_a_callable_that_may_read_any_key_of_a_section_gets_it(target: Callable[..., Any]) -> None:
    instantiate(LazyCall(target)(cfg={"hidden_size": 3, "anything": 4}))
