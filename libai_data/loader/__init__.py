"""The loader: from a dataset and a sampler to batches.

What only the trainer needs is loaded when it is first used, so that workers start quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from libai_data.loader.collate import PadCollator, Padding, trivial_batch_collator
from libai_data.loader.worker_info import WorkerInfo, get_worker_info

if TYPE_CHECKING:
    from libai_data.loader.batch_loader import BatchLoader

__all__ = ["BatchLoader", "PadCollator", "Padding", "WorkerInfo", "get_worker_info", "trivial_batch_collator"]


def __getattr__(name: str) -> Any:
    if name == "BatchLoader":
        return importlib.import_module("libai_data.loader.batch_loader").BatchLoader
    if name == "DataLoader":  # It stood here; now it makes loaders of iterables too, which this folder does not know.
        return importlib.import_module("libai_data").DataLoader
    raise AttributeError(f"module '{__name__}' has no attribute {name!r}")
