"""The loader: from a dataset and a sampler to batches.

Modules that only the trainer needs are imported at first use, so that workers start quickly.
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
    # `DataLoader` was here in earlier versions. Now it also makes loaders of iterables, which are in a folder above.
    {"BatchLoader": "libai_data.loader.batch_loader", "DataLoader": "libai_data"},
)
