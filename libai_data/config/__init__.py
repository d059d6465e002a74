"""Configs: load Python or YAML files, change keys by `key=value`, check, save, and build the objects."""

from __future__ import annotations

from libai_data.config.arguments import default_argument_parser
from libai_data.config.defaults import WRITTEN_TRAIN_KEYS, default_graph, default_train
from libai_data.config.instantiate import LazyCall, instantiate
from libai_data.config.keys import check_keys, try_get_key
from libai_data.config.lazy_config import LazyConfig, get_config
from libai_data.config.signatures import check_targets
from libai_data.config.values import check_values

__all__ = [
    "LazyConfig",
    "get_config",
    "LazyCall",
    "instantiate",
    "try_get_key",
    "default_argument_parser",
    "default_train",
    "default_graph",
    "WRITTEN_TRAIN_KEYS",
    "check_keys",
    "check_targets",
    "check_values",
]
