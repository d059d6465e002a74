"""Pictures to test with, as bytes of files, and what a transform makes of one as some sample of a loader."""

from __future__ import annotations

import io
import numpy as np
from PIL import Image
from functools import cache
from libai_data.data.random.sample_random import reading_samples
from typing import Any


@cache
def photograph() -> np.ndarray:
    """A real photograph, uint8 [427, 640, 3]."""
    from sklearn.datasets import load_sample_image

    return np.asarray(load_sample_image("china.jpg"))


def encoded(pixels: Any, form: str = "JPEG", **options: Any) -> bytes:
    """A file of these pixels: an array, or a Pillow image."""
    buffer = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(buffer, form, **options)
    return buffer.getvalue()


def by_pillow(data: bytes, mode: str = "RGB") -> np.ndarray:
    """What Pillow makes of a file."""
    return np.asarray(Image.open(io.BytesIO(data)).convert(mode))


def as_sample(transform: Any, image: Any, index: int = 0, epoch: int = 0, seed: int = 1) -> np.ndarray:
    """The image, transformed as sample `index` of a loader would be."""
    with reading_samples(((seed, epoch, index),)):
        return np.asarray(transform(image))
