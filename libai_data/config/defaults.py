"""The keys of configs: default and allowed values of each, in LiBai's names.

The default sections and the checks of values are made from this table. docs/api/config_keys.md says what each key
means, and a test compares it with this table. Keys whose value only a config can choose (the evaluator, the schedule,
the graph classes) are None here; the configs that `get_config` loads set these keys.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from omegaconf import DictConfig, ListConfig

from libai_data.config.signatures import TARGET
from libai_data.errors.argument_rules import FLAG, OUTPUT, TEXT, Rule, list_of, one_of, or_none, real, whole


class Key(NamedTuple):
    """A key of a config."""

    default: Any  # the value in configs that do not set the key
    rule: Rule
    is_computed: bool = False  # a run adds the key to the config, so a saved config contains it


def _describes_evaluators(value: Any) -> bool:
    if isinstance(value, ListConfig):
        return all(map(_describes_evaluators, value))
    if isinstance(value, DictConfig):
        return TARGET in value
    return callable(getattr(value, "process", None))


def _unused(default: Any, instead: str) -> Rule:
    rule = one_of(default)
    return rule._replace(allowed=f"{rule.allowed}, since nothing uses it. {instead}")


def _checked_later(rule: Rule) -> Rule:
    """A rule that accepts every value, because the code that reads the key checks the value itself."""
    return rule._replace(accepts=lambda value: True)


_COUNT = whole(1)
_COUNT_OR_INF = Rule(f"{_COUNT.allowed}, or inf", lambda value: value == math.inf or _COUNT.accepts(value))
_EPOCHS = or_none(real(0, 1e9))
_TEXTS = or_none(list_of(str, "texts"))
_PAIRS = or_none(list_of(ListConfig, "lists of two, as [[0, 64], [1000, 128]]"))
_CALL = Rule("a LazyCall", lambda value: isinstance(value, DictConfig))
_SIZE = _checked_later(or_none(_COUNT))

_TRAIN: dict[str, Key] = {
    "output_dir": Key("./output", OUTPUT),
    "train_micro_batch_size": Key(32, or_none(_COUNT)),
    "global_batch_size": Key(None, or_none(_COUNT)),
    "num_accumulation_steps": Key(None, or_none(_COUNT)),
    "batch_size_schedule": Key(None, _PAIRS),
    "skip_steps": Key([], _PAIRS),
    "resume_override": Key([], _TEXTS),
    "may_differ": Key([], _TEXTS),
    "train_iter": Key(10000, or_none(whole(0))),
    "train_epoch": Key(0, _EPOCHS),
    "consumed_train_samples": Key(
        0,
        _unused(
            0, "A checkpoint holds the place in the data; 'libai-data state edit CHECKPOINT --position N' changes it"
        ),
    ),
    "consumed_valid_samples": Key(0, _unused(0, "Every evaluation begins with the first sample")),
    "train_samples": Key(None, _unused(None, "Set train.train_iter or train.train_epoch")),
    "warmup_ratio": Key(0, or_none(real(0, 1))),
    "start_iter": Key(0, _checked_later(whole(0))),
    "amp.enabled": Key(False, FLAG),
    "activation_checkpoint.enabled": Key(False, FLAG),
    "nccl_fusion_threshold_mb": Key(16, whole(0)),
    "nccl_fusion_max_ops": Key(24, _COUNT),
    "zero_optimization.enabled": Key(False, FLAG),
    "zero_optimization.stage": Key(1, one_of(1, 2, 3)),
    "checkpointer.period": Key(5000, _COUNT),
    "checkpointer.max_to_keep": Key(100, or_none(_COUNT)),
    "checkpointer.save_model_after_n_epoch": Key(None, _EPOCHS),
    "checkpointer.stop_signals": Key(["SIGTERM", "SIGUSR1"], _TEXTS),
    "test_micro_batch_size": Key(32, _COUNT),
    "evaluation.enabled": Key(True, FLAG),
    "evaluation.evaluator": Key(None, or_none(Rule("a LazyCall, or a list of such", _describes_evaluators))),
    "evaluation.eval_period": Key(5000, whole(0)),
    "evaluation.eval_after_n_epoch": Key(None, _EPOCHS),
    "evaluation.eval_iter": Key(100000, _COUNT_OR_INF),
    "evaluation.eval_metric": Key("Acc@1", TEXT),
    "evaluation.eval_mode": Key("max", one_of("max", "min")),
    "early_stopping.patience": Key(None, or_none(_COUNT)),
    "early_stopping.min_delta": Key(0.0, real(0, 1e300)),
    "early_stopping.metric": Key(None, or_none(TEXT)),
    "early_stopping.mode": Key(None, or_none(one_of("max", "min"))),
    "load_weight": Key("", or_none(TEXT)),
    "load_weight_may_differ": Key(None, _TEXTS),
    "log_period": Key(20, _COUNT),
    "progress_bar": Key(None, or_none(FLAG)),
    "stop_on_nonfinite_loss": Key(True, FLAG),
    "scheduler": Key(None, or_none(_CALL)),
    "dist.data_parallel_size": Key(None, _SIZE),
    "dist.tensor_parallel_size": Key(1, _SIZE),
    "dist.pipeline_parallel_size": Key(1, _SIZE),
    "dist.pipeline_num_layers": Key(None, or_none(_COUNT)),
    "dist.custom_pipeline_stage_id": Key(None, or_none(list_of(int, "ints"))),
    "dist.device_type": Key("cuda", _checked_later(one_of("cuda", "cpu"))),
    "input_placement_device": Key("cuda", one_of("cuda", "cpu")),
    "rdma_enabled": Key(False, FLAG),
    "seed": Key(1234, whole(0, 2**32 - 1)),
    "resume": Key(False, FLAG, is_computed=True),
    "warmup_iter": Key(None, or_none(whole(0)), is_computed=True),
    "samples": Key(None, _SIZE, is_computed=True),
    "computed": Key(None, or_none(_CALL._replace(allowed="what a trainer wrote")), is_computed=True),
    "dist.num_nodes": Key(None, _SIZE, is_computed=True),
    "dist.num_gpus_per_node": Key(None, _SIZE, is_computed=True),
    "dist.auto_pipeline_stage_id": Key(None, or_none(list_of(int, "ints")), is_computed=True),
    "dist.actual_pipeline_stage_id": Key(None, or_none(list_of(int, "ints")), is_computed=True),
}

_GRAPH: dict[str, Key] = {
    "enabled": Key(True, FLAG),
    "debug": Key(-1, whole(-1, 3)),
    "auto_parallel.enabled": Key(False, FLAG),
    "auto_parallel.enable_auto_parallel_ignore_user_sbp_config": Key(False, FLAG),
    "auto_parallel.trunk_algo": Key(True, FLAG),
    "auto_parallel.sbp_collector": Key(False, FLAG),
    "train_graph": Key(None, _checked_later(or_none(_CALL))),
    "global_mode.enabled": Key(False, FLAG),
    "eval_graph": Key(None, _checked_later(or_none(_CALL))),
}

_TOKENIZATION: dict[str, Key] = {
    "tokenizer": Key(None, _checked_later(or_none(_CALL))),
    "append_eod": Key(False, _unused(False, "'libai-data preprocess --append-eod' ends each document with the token")),
    "make_vocab_size_divisible_by": Key(128, _COUNT),
}

KEYS: dict[str, Key] = {
    f"{section}.{name}": key
    for section, keys in (("train", _TRAIN), ("graph", _GRAPH), ("tokenization", _TOKENIZATION))
    for name, key in keys.items()
}
"""Every dotted key of the sections that `check_values` checks."""

SECTION_NAMES = ("train", "dataloader", "datamodule", "model", "optim", "graph", "tokenization")
"""The sections of a config that code reads."""

WRITTEN_TRAIN_KEYS = tuple(name for name, key in _TRAIN.items() if key.is_computed)
"""Keys that a run adds to `train`. A saved config contains them, so they are allowed, though no user sets them."""


def default_train() -> DictConfig:
    """A new `train` section with every key that a config may set."""
    return _section(_TRAIN)


def default_graph() -> DictConfig:
    """A new `graph` section (static graph mode) with every key that a config may set."""
    return _section(_GRAPH)


def _section(keys: dict[str, Key]) -> DictConfig:
    section: dict[str, Any] = {}
    for name, key in keys.items():
        if not key.is_computed:
            *parents, last = name.split(".")
            node = section
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = key.default
    return DictConfig(section, flags={"allow_objects": True})
