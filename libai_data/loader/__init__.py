"""The loader: from a dataset and a sampler to batches.

What only the trainer needs is loaded when it is first used, so that workers start quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from libai_data import lazy_names
from libai_data.loader.collate import PadCollator, Padding, trivial_batch_collator
from libai_data.loader.worker_info import WorkerInfo, get_worker_info

if TYPE_CHECKING:
    from libai_data.loader.batch_loader import BatchLoader

__all__ = ["BatchLoader", "PadCollator", "Padding", "WorkerInfo", "get_worker_info", "trivial_batch_collator"]


__getattr__, __dir__ = lazy_names(
    __name__,
    # `DataLoader` was here; now it makes loaders of iterables too, which this folder does not know.
    {"BatchLoader": "libai_data.loader.batch_loader", "DataLoader": "libai_data"},
)
