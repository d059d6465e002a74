"""Checks the values of the keys of `train`, `graph` and `tokenization`, before anything is built."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from libai_data.config.defaults import KEYS, SECTION_NAMES, WRITTEN_TRAIN_KEYS, default_graph, default_train
from libai_data.config.keys import check_keys, join_path, try_get_key
from libai_data.config.signatures import TARGET
from libai_data.errors import ConfigError, nearest

_GPU_ONLY = ("train.amp.enabled", "train.zero_optimization.enabled")
_GRAPH_ONLY = (
    *_GPU_ONLY,
    "train.activation_checkpoint.enabled",
    "graph.auto_parallel.enabled",
    "graph.global_mode.enabled",
)
_EARLY, _AUTO, _ZERO = "train.early_stopping", "graph.auto_parallel", "train.zero_optimization"
_NEEDS = {
    **dict.fromkeys((f"{_EARLY}.metric", f"{_EARLY}.mode", f"{_EARLY}.min_delta"), (f"{_EARLY}.patience",)),
    "train.load_weight_may_differ": ("train.load_weight", "train.resume"),
    "graph.debug": ("graph.enabled",),
}
"""Keys that have an effect only with another key, and the keys of which one must be set."""
_SWITCHED = {
    f"{_ZERO}.stage": f"{_ZERO}.enabled",
    f"{_AUTO}.enable_auto_parallel_ignore_user_sbp_config": f"{_AUTO}.enabled",
    f"{_AUTO}.trunk_algo": f"{_AUTO}.enabled",
    f"{_AUTO}.sbp_collector": f"{_AUTO}.enabled",
}
_ABSENT = object()
# It is compared with, never changed.
_default_train = cache(default_train)


def check_values(cfg: Any) -> None:
    """Check that a config has `train`, no unknown keys in `train` and `graph`, and only allowed values.

    A key of `train` that the config does not have gets its default. A float such as 1e9 becomes an int if the key needs
    an int.

    Raises:
        ConfigError: The config is wrong; the message names the key, its value and the allowed values.
    """
    if not isinstance(cfg, DictConfig):
        raise ConfigError(
            f"the config is a {type(cfg).__name__}; give what LazyConfig.load returns, or make a DictConfig of it: "
            "DictConfig(config, flags={'allow_objects': True})"
        )
    if not isinstance(_value_of(cfg, "train"), Mapping):
        raise ConfigError(
            "the config has no 'train' section; it begins with train = get_config('common/train.py').train"
        )
    _refuse_mistyped_sections(cfg)
    for section in ("train", "graph"):
        _check_given(_value_of(cfg, section), section)
    check_keys(cfg.train, _default_train(), "train", also=WRITTEN_TRAIN_KEYS)
    if try_get_key(cfg, "graph") is not None:
        check_keys(cfg.graph, default_graph(), "graph")
    problems = []
    for key, (default, rule, is_computed) in KEYS.items():
        value = _value_of(cfg, key)
        if value is _ABSENT and key.startswith("train.") and not is_computed:
            OmegaConf.update(cfg, key, default, force_add=True)
        if value is _ABSENT or rule.accepts(value):
            continue
        if isinstance(value, float) and value.is_integer() and rule.accepts(int(value)):
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


def _refuse_mistyped_sections(cfg: Any) -> None:
    """Refuse a section whose name is nearly that of a section which the config lacks, because nothing would read it."""
    missing = [name for name in SECTION_NAMES if name not in cfg]
    for name in cfg:
        hint = "" if name in SECTION_NAMES else nearest(name, missing, cutoff=0.8)
        if hint:
            raise ConfigError(
                f"The config has a section {name!r}, which nothing reads.{hint} If a config file needs it for itself, "
                f"call it _{name}."
            )


def check_lone_keys(cfg: Any) -> None:
    """Raise a ConfigError if a config sets a key that has no effect, because a key that it needs is not set."""
    for key, needed in _NEEDS.items():
        if _is_set(cfg, key) and not any(try_get_key(cfg, each) for each in needed):
            value, other = try_get_key(cfg, key), try_get_key(cfg, needed[0])
            raise ConfigError(
                f"{key} is {value!r}, but {needed[0]} is {other!r}, and without it the key has no effect. Set "
                f"{needed[0]}, or delete {key}."
            )


def keys_switched_off(cfg: Any) -> list[str]:
    """What to say of keys of features that the config does not enable."""
    return [
        f"{key} is {try_get_key(cfg, key)!r}, but {switch} is not True, so it has no effect."
        for key, switch in _SWITCHED.items()
        if _is_set(cfg, key) and not try_get_key(cfg, switch)
    ]


def _is_set(cfg: Any, key: str) -> bool:
    """Whether a config sets a key to another value than the default."""
    default = KEYS[key].default
    return bool(try_get_key(cfg, key, default=default) != default)


def check_device(cfg: Any, device_type: str) -> None:
    """Raise a ConfigError if a key needs a GPU, and the job runs on the CPU."""
    for key in _GPU_ONLY if device_type == "cpu" else ():
        if try_get_key(cfg, key):
            raise ConfigError(
                f"{key} is True, but it works on GPUs only, and this job runs on the CPU. Set {key}=False."
            )


def fill_in(cfg: Any, key: str, value: Any) -> None:
    """Set a key that the trainer computes, and record the value, so that `given` knows that no user set it."""
    OmegaConf.update(cfg, key, value, force_add=True)
    OmegaConf.update(cfg, _record_of(key), value, force_add=True)


def given(cfg: Any, key: str) -> Any:
    """The user's value of a key that the trainer would compute; None if the user set none."""
    value, computed = try_get_key(cfg, key), try_get_key(cfg, _record_of(key), default=_ABSENT)
    return None if value is computed or (type(value) is type(computed) and value == computed) else value


def require(cfg: Any, key: str, value: Any, source: str, default: Any = None) -> None:
    """Set a key that only the trainer sets; a ConfigError if a config has a value besides None and `default`."""
    users = given(cfg, key)
    if users not in (None, default, value):
        raise ConfigError(f"{key} is {users!r}, but the trainer sets it to {value!r}, from {source}. Delete {key}.")
    fill_in(cfg, key, value)


def _check_given(node: Any, path: str) -> None:
    """Reject keys that are open (`???`) or refer to a missing key; not in LazyCalls, to which the trainer may add."""
    if isinstance(node, DictConfig) and TARGET not in node:
        keys: Any = list(node)
    else:
        keys = range(len(node)) if isinstance(node, ListConfig) else ()
    for key in keys:
        where = join_path(path, key)
        try:
            value = node[key]
        except OmegaConfBaseException as error:
            raise _no_value(where, error) from None
        _check_given(value, where)


def _record_of(key: str) -> str:
    return "train.computed." + key.replace(".", "/")


def _value_of(cfg: Any, key: str) -> Any:
    try:
        return OmegaConf.select(cfg, key, default=_ABSENT, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise _no_value(key, error) from None


def _no_value(key: str, error: OmegaConfBaseException) -> ConfigError:
    return ConfigError(f"{key} has no value: {str(error).splitlines()[0]}")
