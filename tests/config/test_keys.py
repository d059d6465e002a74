from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from libai_data.config import WRITTEN_TRAIN_KEYS, LazyCall, check_keys, default_train, try_get_key
from libai_data.errors import ConfigError


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (("x.y", "a.b", "c"), 1),
        (("c",), None),
        (("x", "a.z"), 5),
        (("a.b.c",), 5),
        (("c.b.c",), 5),
        (("l.x", "l.7"), 5),
    ],
)
def test_try_get_key_gives_the_first_key_that_the_config_has_or_the_default(keys: Any, expected: Any) -> None:
    cfg = OmegaConf.create({"a": {"b": 1}, "c": None, "l": [1]})
    assert try_get_key(cfg, *keys, default=5) == expected


def test_try_get_key_refuses_a_reference_to_nothing() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        try_get_key(OmegaConf.create({"a": "${nowhere}"}), "a")


def test_defaults_pass_their_own_check_also_as_a_run_saves_them() -> None:
    train = default_train()
    check_keys(train, default_train(), path="train")
    for key in WRITTEN_TRAIN_KEYS:
        OmegaConf.update(train, key, 1)
    check_keys(train, default_train(), path="train", also=WRITTEN_TRAIN_KEYS)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train_iters", 5, r"Unknown key train\.train_iters\. Did you mean 'train_iter'\?"),
        ("dist.tensor_paralel_size", 2, r"train\.dist\.tensor_paralel_size\. Did you mean 'tensor_parallel_size'"),
        ("tensor_parallel_size", 2, r"It belongs at train\.dist\.tensor_parallel_size"),
        ("evaluation.log_period", 2, r"It belongs at train\.log_period"),
        ("amp", True, r"train\.amp must be a section with the keys enabled; found True"),
    ],
)
def test_a_wrong_key_is_refused_with_what_is_meant_or_where_it_belongs(key: str, value: Any, message: str) -> None:
    train = default_train()
    OmegaConf.update(train, key, value, force_add=True)
    with pytest.raises(ConfigError, match=message):
        check_keys(train, default_train(), path="train")


def test_all_unknown_keys_are_named_at_once() -> None:
    train = default_train()
    train.sed = 1
    train.amp.enable = True
    with pytest.raises(ConfigError) as raised:
        check_keys(train, default_train(), path="train")
    assert "train.sed" in str(raised.value) and "train.amp.enable" in str(raised.value)


def test_open_sections_plain_dicts_and_interpolated_sections_are_checked_as_far_as_they_are_known() -> None:
    train = default_train()
    train.scheduler = LazyCall(dict)(anything=1)
    train.evaluation.evaluator = LazyCall(dict)(topk=(1, 5))
    check_keys(train, default_train(), path="train")
    with pytest.raises(ConfigError, match=r"Unknown key modle\. Did you mean 'model'\?"):
        check_keys({"modle": 1}, {"model": None})
    cfg = OmegaConf.create({"train": {"amp": "${other}"}, "other": {"x": 1}})
    assert isinstance(cfg, DictConfig)
    check_keys(cfg.train, default_train(), path="train")
