"""A blend that is filtered and packed, and one whose weights change at a step: what trainings are killed on."""

from __future__ import annotations

import numpy as np

from libai_data import DistTensorData, Instance
from libai_data.data.datasets import BlendedDataset, FilteredDataset, PackedDataset
from tests.engine.tiny import TinyDataset

STEPS, UNITS = 24, 6
# Grows before the weights of `blended` change, and while packs are half filled.
BATCH_SIZES = ((0, 8), (6, 12))


class Documents:
    """Documents of 1 to 9 tokens."""

    def __init__(self, samples: int, seed: int) -> None:
        self.lengths = np.random.default_rng(seed).integers(1, 10, samples)
        self.seed = seed

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Instance:
        random = np.random.default_rng([self.seed, index])
        points = random.standard_normal(self.lengths[index]).astype(np.float32)
        labels = random.integers(0, 3, self.lengths[index])
        return Instance(points=DistTensorData(points), labels=DistTensorData(labels, placement_idx=-1))


def packed() -> PackedDataset:
    """Sequences of long documents of two sources."""
    blend = BlendedDataset([Documents(40, 1), Documents(25, 2)], [0.7, 0.3], {50: [0.2, 0.8]})
    return PackedDataset(FilteredDataset(blend, lambda sample: len(sample.points.tensor) > 2), UNITS)


def blended() -> BlendedDataset:
    """Samples of two sources."""
    return BlendedDataset([TinyDataset(40), TinyDataset(25, seed=1)], [3, 1], changes_at_steps={12: [1, 3]})
