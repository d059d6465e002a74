"""The loader: from a dataset and a sampler to batches."""

from libai_data.loader.collate import PadCollator, Padding, trivial_batch_collator
from libai_data.loader.dataloader import DataLoader

__all__ = ["DataLoader", "PadCollator", "Padding", "trivial_batch_collator"]
