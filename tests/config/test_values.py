from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from libai_data.config import LazyConfig, check_targets, check_values, default_graph, default_train
from libai_data.config.values import check_device, fill_in, require
from libai_data.config.values import given as given_value
from libai_data.errors import ConfigError
from tests.properties import examples


def config() -> DictConfig:
    cfg = DictConfig({"train": default_train(), "graph": default_graph()}, flags={"allow_objects": True})
    cfg.tokenization = {"tokenizer": None, "append_eod": False, "make_vocab_size_divisible_by": 128}
    return cfg


def leaves(section: DictConfig, path: str) -> Iterator[str]:
    for key, value in section.items():
        yield from leaves(value, f"{path}.{key}") if isinstance(value, DictConfig) else [f"{path}.{key}"]


KEYS = [key for name, section in config().items() for key in leaves(section, name)]
CHECKED_ELSEWHERE = {
    # By the mesh, the step plan, and `instantiate`.
    *(f"train.dist.{name}_parallel_size" for name in ("data", "tensor", "pipeline")),
    "train.dist.device_type",
    "train.start_iter",
    "graph.train_graph",
    "graph.eval_graph",
    "tokenization.tokenizer",
}
ODD = st.sampled_from([-1, 1.5, 2**40, math.inf, -math.inf, math.nan, None, "", "x", True, [], [0.5], {}, {"a": 1}])


@pytest.mark.parametrize("found", [{"train": {}}, "config.py", None])
def test_a_config_that_is_no_config_is_refused(found: Any) -> None:
    with pytest.raises(ConfigError, match=rf"the config is a {type(found).__name__}; give what LazyConfig.load"):
        check_values(found)


def test_the_defaults_are_accepted_and_stay() -> None:
    cfg = config()
    check_values(cfg)
    assert cfg == config()


@pytest.mark.parametrize(("name", "meant"), [("grpah", "graph"), ("tokenizaton", "tokenization"), ("modle", "model")])
def test_a_section_that_is_nearly_one_that_is_missing_is_refused(name: str, meant: str) -> None:
    cfg = DictConfig({"train": default_train(), name: {"enabled": True}})
    with pytest.raises(ConfigError, match=rf"has a section '{name}', which nothing reads. Did you mean '{meant}'"):
        check_values(cfg)


def test_other_sections_of_a_config_are_its_own() -> None:
    cfg = config()
    cfg.tokenizer, cfg.graphs, cfg.dataset, cfg.trainer = {}, {}, {}, {}
    check_values(cfg)


def test_every_default_key_has_a_rule() -> None:
    refused, cfg = set(), config()
    for key in KEYS:
        default = OmegaConf.select(cfg, key)
        OmegaConf.update(cfg, key, object(), merge=False)
        try:
            check_values(cfg)
        except ConfigError as error:
            assert str(error).startswith(f"{key} is ")
            refused.add(key)
        OmegaConf.update(cfg, key, default, merge=False)
    assert set(KEYS) - refused == CHECKED_ELSEWHERE


@settings(max_examples=examples(200))
@given(key=st.sampled_from(KEYS), value=ODD)
def test_an_odd_value_is_accepted_or_refused_by_an_error_that_names_the_key(key: str, value: Any) -> None:
    cfg = config()
    OmegaConf.update(cfg, key, value, merge=False)
    try:
        check_values(cfg)
    except ConfigError as error:
        assert key in str(error)
    else:
        kept = OmegaConf.select(cfg, key)
        assert kept == value or (isinstance(value, float) and math.isnan(value))


@pytest.mark.parametrize("folder", ["s3://bucket/run", "~/run"])
def test_an_output_folder_that_is_no_path_of_this_machine_is_refused(folder: str) -> None:
    cfg = config()
    cfg.train.output_dir = folder
    with pytest.raises(ConfigError, match=f"train.output_dir is {folder!r}"):
        check_values(cfg)


@pytest.mark.parametrize("key", ["train.dist.auto_pipeline_stage_id", "train.dist.actual_pipeline_stage_id"])
def test_stages_that_a_run_has_computed_are_numbers(key: str) -> None:
    cfg = config()
    for value in ([0, 1], None):
        OmegaConf.update(cfg, key, value, force_add=True)
        check_values(cfg)
    OmegaConf.update(cfg, key, ["first", "second"], force_add=True)
    with pytest.raises(ConfigError, match=f"{key} is .*a list of ints"):
        check_values(cfg)


@pytest.mark.parametrize("key", ["train.seed", "train.evaluation.eval_iter", "train.log_period"])
def test_whole_floats_become_ints(key: str) -> None:
    cfg = config()
    OmegaConf.update(cfg, key, 1e9)
    check_values(cfg)
    assert type(OmegaConf.select(cfg, key)) is int


def test_missing_keys_get_their_defaults_and_open_and_unknown_ones_are_refused() -> None:
    cfg = config()
    del cfg.train["log_period"]
    check_values(cfg)
    assert cfg.train.log_period == default_train().log_period
    cfg = DictConfig({"train": {}})
    check_values(cfg)
    assert cfg.train == default_train()
    cfg = config()
    cfg.graph.enable = True
    with pytest.raises(ConfigError, match=r"graph\.enable\. Did you mean 'enabled'"):
        check_values(cfg)


@pytest.mark.parametrize("value", ["???", "${no.such.key}"])
@pytest.mark.parametrize("key", ["train", "train.amp", "train.dist.device_type", "train.checkpointer.stop_signals.0"])
def test_a_key_that_is_open_or_refers_to_nothing_is_refused_by_name(key: str, value: str) -> None:
    cfg = config()
    OmegaConf.update(cfg, key, value, merge=False)
    with pytest.raises(ConfigError, match=f"^{key} has no value"):
        check_values(cfg)


@pytest.mark.parametrize(
    "key",
    [
        "train.amp.enabled",
        "train.zero_optimization.enabled",
        "train.activation_checkpoint.enabled",
        "graph.auto_parallel.enabled",
        "graph.global_mode.enabled",
    ],
)
def test_what_needs_graph_mode_is_refused_in_eager_mode(key: str) -> None:
    cfg = config()
    OmegaConf.update(cfg, key, True)
    check_values(cfg)
    cfg.graph.enabled = False
    with pytest.raises(ConfigError, match=rf"{key} is True, .*Set graph.enabled=True, or {key}=False"):
        check_values(cfg)
    del cfg["graph"]
    if key.startswith("train"):
        with pytest.raises(ConfigError, match=key):
            check_values(cfg)


@pytest.mark.parametrize("key", ["train.amp.enabled", "train.zero_optimization.enabled"])
def test_what_needs_a_gpu_is_refused_on_a_cpu(key: str) -> None:
    cfg = config()
    check_device(cfg, "cpu")
    OmegaConf.update(cfg, key, True)
    check_device(cfg, "cuda")
    with pytest.raises(ConfigError, match=rf"{key} is True, but it works on GPUs only"):
        check_device(cfg, "cpu")


def test_what_the_trainer_filled_in_is_not_taken_for_the_users() -> None:
    cfg = config()
    assert given_value(cfg, "train.warmup_iter") is None
    fill_in(cfg, "train.warmup_iter", 3)
    assert given_value(cfg, "train.warmup_iter") is None
    cfg.train.warmup_iter = 5
    assert given_value(cfg, "train.warmup_iter") == 5
    require(cfg, "train.samples", 8, "train.train_iter")
    require(cfg, "train.samples", 9, "train.train_iter")
    cfg.train.samples = 500
    with pytest.raises(ConfigError, match=r"train.samples is 500, .* sets it to 9, from train.train_iter"):
        require(cfg, "train.samples", 9, "train.train_iter")


def test_the_packaged_configs_pass_all_checks(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repository))
    files = sorted((repository / "configs").glob("*.py"))
    assert files
    for file in files:
        cfg = LazyConfig.load(file)
        check_values(cfg)
        check_targets(cfg)
