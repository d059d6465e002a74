"""Which values the keys of `train`, `graph` and `tokenization` can have, checked before anything is built."""

from __future__ import annotations

import math
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from libai_data.config.argument_rules import FLAG, PATH, TEXT, Rule, list_of, one_of, or_none, real, whole
from libai_data.config.defaults import WRITTEN_TRAIN_KEYS, default_graph, default_train
from libai_data.config.keys import check_keys, try_get_key
from libai_data.errors import ConfigError

_COUNT = whole(1)
_COUNT_OR_INF = Rule(f"{_COUNT.allowed}, or inf", lambda value: value == math.inf or _COUNT.holds(value))
_EPOCHS = or_none(real(0, 1e9))
_TEXTS = or_none(list_of(str, "texts"))


def _unused(default: Any, instead: str) -> Rule:
    rule = one_of(default)
    return rule._replace(allowed=f"{rule.allowed}, since nothing uses it. {instead}")


_RULES: dict[str, Rule] = {
    "train.output_dir": PATH,
    "train.train_micro_batch_size": or_none(_COUNT),
    "train.global_batch_size": or_none(_COUNT),
    "train.num_accumulation_steps": or_none(_COUNT),
    "train.resume_override": _TEXTS,
    "train.may_differ": _TEXTS,
    "train.train_iter": or_none(whole(0)),
    "train.train_epoch": _EPOCHS,
    "train.train_samples": _unused(None, "Set train.train_iter or train.train_epoch"),
    "train.consumed_train_samples": _unused(
        0, "A checkpoint holds the place in the data; 'libai-data state edit CHECKPOINT --position N' changes it"
    ),
    "train.consumed_valid_samples": _unused(0, "Every evaluation begins with the first sample"),
    "train.warmup_ratio": or_none(real(0, 1)),
    "train.warmup_iter": or_none(whole(0)),
    "train.amp.enabled": FLAG,
    "train.activation_checkpoint.enabled": FLAG,
    "train.nccl_fusion_threshold_mb": whole(0),
    "train.nccl_fusion_max_ops": _COUNT,
    "train.zero_optimization.enabled": FLAG,
    "train.zero_optimization.stage": one_of(1, 2, 3),
    "train.checkpointer.period": _COUNT,
    "train.checkpointer.max_to_keep": or_none(_COUNT),
    "train.checkpointer.save_model_after_n_epoch": _EPOCHS,
    "train.checkpointer.stop_signals": _TEXTS,
    "train.test_micro_batch_size": _COUNT,
    "train.evaluation.enabled": FLAG,
    "train.evaluation.eval_period": whole(0),
    "train.evaluation.eval_after_n_epoch": _EPOCHS,
    "train.evaluation.eval_iter": _COUNT_OR_INF,
    "train.evaluation.eval_metric": TEXT,
    "train.evaluation.eval_mode": one_of("max", "min"),
    "train.load_weight": or_none(TEXT),
    "train.load_weight_may_differ": _TEXTS,
    "train.log_period": _COUNT,
    "train.stop_on_nonfinite_loss": FLAG,
    "train.dist.pipeline_num_layers": or_none(_COUNT),
    "train.dist.custom_pipeline_stage_id": or_none(list_of(int, "ints")),
    "train.input_placement_device": one_of("cuda", "cpu"),
    "train.rdma_enabled": FLAG,
    "train.seed": whole(0, 2**32 - 1),
    "train.resume": FLAG,
    "graph.enabled": FLAG,
    "graph.debug": whole(-1, 3),
    "graph.auto_parallel.enabled": FLAG,
    "graph.auto_parallel.enable_auto_parallel_ignore_user_sbp_config": FLAG,
    "graph.auto_parallel.trunk_algo": FLAG,
    "graph.auto_parallel.sbp_collector": FLAG,
    "graph.global_mode.enabled": FLAG,
    "tokenization.append_eod": _unused(False, "'libai-data preprocess --append-eod' ends each document with the token"),
    "tokenization.make_vocab_size_divisible_by": _COUNT,
}

_GPU_ONLY = ("train.amp.enabled", "train.zero_optimization.enabled")
_GRAPH_ONLY = (
    *_GPU_ONLY,
    "train.activation_checkpoint.enabled",
    "graph.auto_parallel.enabled",
    "graph.global_mode.enabled",
)
_ABSENT = object()


def check_values(cfg: Any) -> None:
    """Refuse unknown keys of `train` and `graph`, and values that cannot work.

    A key of `train` that the config does not have gets its default. A float such as 1e9 becomes an int where an int is
    meant.

    Args:
        cfg: the whole config; it is completed.

    Raises:
        ConfigError: Naming the key, its value and what is allowed.
    """
    check_keys(cfg.train, default_train(), "train", also=WRITTEN_TRAIN_KEYS)
    if try_get_key(cfg, "graph") is not None:
        check_keys(cfg.graph, default_graph(), "graph")
    defaults = DictConfig({"train": default_train()}, flags={"allow_objects": True})
    problems = []
    for key, rule in _RULES.items():
        value = _value_of(cfg, key)
        if value is _ABSENT:
            if try_get_key(defaults, key) is not None:
                OmegaConf.update(cfg, key, try_get_key(defaults, key), force_add=True)
            continue
        if rule.holds(value):
            continue
        if isinstance(value, float) and value.is_integer() and rule.holds(int(value)):
            OmegaConf.update(cfg, key, int(value))
            continue
        problems.append(rule.problem(key, value))
    if problems:
        raise ConfigError("\n".join(problems))
    if not try_get_key(cfg, "graph.enabled", default=False):
        for key in _GRAPH_ONLY:
            if try_get_key(cfg, key):
                raise ConfigError(
                    f"{key} is True, but graph.enabled is not: it works in graph mode only. Set graph.enabled=True, or "
                    f"{key}=False."
                )


def check_device(cfg: Any, device_type: str) -> None:
    """Refuse keys that need a GPU where there is none.

    Args:
        cfg: the whole config.
        device_type: of the mesh.

    Raises:
        ConfigError: Naming the key.
    """
    for key in _GPU_ONLY if device_type == "cpu" else ():
        if try_get_key(cfg, key):
            raise ConfigError(
                f"{key} is True, but it works on GPUs only, and this job runs on the CPU. Set {key}=False."
            )


def fill_in(cfg: Any, key: str, value: Any) -> None:
    """Set a key that the trainer computes, and note the value, so that `given` does not take it for the user's."""
    OmegaConf.update(cfg, key, value, force_add=True)
    OmegaConf.update(cfg, _record_of(key), value, force_add=True)


def given(cfg: Any, key: str) -> Any:
    """The user's value of a key that the trainer else computes; None where there is none."""
    value, computed = try_get_key(cfg, key), try_get_key(cfg, _record_of(key), default=_ABSENT)
    return None if value is computed or (type(value) is type(computed) and value == computed) else value


def require(cfg: Any, key: str, value: Any, source: str, default: Any = None) -> None:
    """Set a key that only the trainer may decide.

    Args:
        cfg: the whole config.
        key: dotted.
        value: the trainer's.
        source: where that comes from.
        default: what stands in configs that do not decide it.

    Raises:
        ConfigError: The user gave another value.
    """
    users = given(cfg, key)
    if users not in (None, default, value):
        raise ConfigError(f"{key} is {users!r}, but the trainer sets it to {value!r}, from {source}. Delete {key}.")
    fill_in(cfg, key, value)


def _record_of(key: str) -> str:
    return "train.computed." + key.replace(".", "/")


def _value_of(cfg: Any, key: str) -> Any:
    try:
        return OmegaConf.select(cfg, key, default=_ABSENT, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key} has no value: {error}") from error
