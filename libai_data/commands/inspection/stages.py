"""A sample after each stage of its dataset, as far as the dataset tells them."""

from __future__ import annotations

from typing import Any

import numpy as np

from libai_data.data.datasets.combine import ConcatDataset, Subset
from libai_data.data.datasets.random_split import RandomPart
from libai_data.data.random.global_generators import seeded
from libai_data.data.random.hashing import combine64
from libai_data.data.random.sample_random import reading_samples

Stage = tuple[str, Any]


def stages_of_sample(dataset: Any, seed: int, epoch: int, index: int) -> list[Stage]:
    """What a sample is after each stage, with the random numbers that a loader would give it.

    Args:
        dataset: its method `stages(index)`, if it has one, yields (name of the stage, Pillow image or array), the last
            one the field as the model gets it. Datasets made of datasets ask theirs.
        seed: of the loader.
        epoch: of the sample.
        index: of the sample.

    Returns:
        The stages; none if the dataset does not tell.
    """
    own = index
    while not callable(getattr(dataset, "stages", None)):
        if isinstance(dataset, ConcatDataset):
            number, own = dataset.locate(own)
            dataset = dataset.datasets[number]
        elif isinstance(dataset, Subset):
            dataset, own = dataset.dataset, dataset.start + own
        elif isinstance(dataset, RandomPart):
            dataset, own = dataset.dataset, int(dataset.indices(np.array([own]))[0])
        else:
            return []
    key = seed, epoch, index
    with reading_samples((key,)), seeded(combine64(*key)):
        return list(dataset.stages(own))
