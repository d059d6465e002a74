"""Configs: written in Python or YAML, changed by `key=value`, checked, saved, and built into objects."""

from __future__ import annotations

from libai_data.config.defaults import WRITTEN_TRAIN_KEYS, default_graph, default_train
from libai_data.config.keys import check_keys, try_get_key

__all__ = [
    "default_train",
    "default_graph",
    "WRITTEN_TRAIN_KEYS",
    "check_keys",
    "try_get_key",
]
