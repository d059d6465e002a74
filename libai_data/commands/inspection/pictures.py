"""Arrays as small pictures."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from libai_data.commands.inspection.field_kinds import channels_at, is_picture

SIDE = 96
"""Pixels of the longer side of a picture, at most; small ones are enlarged by whole factors."""


def range_of(values: Any) -> tuple[float, float] | None:
    """The least and the largest finite number of arrays that are to be shown on one scale; None for 8-bit pictures."""
    arrays = [np.asarray(value) for value in values]
    if all(array.dtype == np.uint8 for array in arrays):
        return None
    finite = [array[np.isfinite(array)] for array in arrays]
    filled = [array for array in finite if array.size]
    if not filled:
        return (0.0, 1.0)
    return float(min(array.min() for array in filled)), float(max(array.max() for array in filled))


def as_picture(value: Any, scale: tuple[float, float] | None) -> Image.Image | None:
    """Make a picture of what a transform gave.

    Args:
        value: a Pillow image, or an array [H, W], [C, H, W] or [H, W, C] with 1, 3 or 4 channels.
        scale: numbers that become black and white; None for 8 bits as they are.

    Returns:
        The picture, its longer side at most `SIDE` pixels; None if `value` cannot be shown as one. What is not finite
        is red.
    """
    if isinstance(value, Image.Image):
        return _sized(value.convert("RGB"))
    array = np.asarray(value)
    if not is_picture(array):
        return None
    dim = channels_at(array.shape)
    channels_last = array[..., None] if dim == -1 else np.moveaxis(array, dim or 0, -1) if dim == 0 else array
    channels_last = np.repeat(channels_last, 3, axis=-1) if channels_last.shape[-1] == 1 else channels_last[..., :3]
    if scale is None:
        return _sized(Image.fromarray(np.ascontiguousarray(channels_last.astype(np.uint8))))
    low, high = scale
    numbers = channels_last.astype(np.float64)
    broken = ~np.isfinite(numbers).all(axis=-1)
    pixels = np.clip((np.where(np.isfinite(numbers), numbers, low) - low) / ((high - low) or 1.0), 0, 1) * 255
    pixels[broken] = (255, 0, 0)
    return _sized(Image.fromarray(np.ascontiguousarray(np.round(pixels).astype(np.uint8))))


def data_uri(picture: Image.Image) -> str:
    """A picture within a page: a PNG as `data:` address."""
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def _sized(picture: Image.Image) -> Image.Image:
    longer = max(picture.size)
    if longer > SIDE:
        shrunk = tuple(max(1, round(side * SIDE / longer)) for side in picture.size)
        return picture.resize((shrunk[0], shrunk[1]), Image.Resampling.BOX)
    factor = SIDE // longer
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
