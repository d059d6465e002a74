"""What a transform makes of one picture, as some sample of a loader."""

from __future__ import annotations

from typing import Any

import numpy as np

from libai_data.data.random.sample_random import reading_samples


def as_sample(transform: Any, image: Any, index: int = 0, epoch: int = 0, seed: int = 1) -> np.ndarray:
    """The image, transformed as sample `index` of a loader would be."""
    with reading_samples(((seed, epoch, index),)):
        return np.asarray(transform(image))
