"""Pictures to test with, as bytes of files, and what a transform makes of one as some sample of a loader."""

from __future__ import annotations

import io
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from libai_data.data.random.sample_random import reading_samples


@cache
def photograph() -> np.ndarray:
    """A real photograph, uint8 [427, 640, 3], of those that scikit-learn has; importing it takes seconds."""
    spec = find_spec("sklearn")
    assert spec is not None and spec.origin is not None
    return by_pillow(Path(spec.origin).with_name("datasets").joinpath("images", "china.jpg").read_bytes())


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
