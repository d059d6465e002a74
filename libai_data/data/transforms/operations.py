"""Operations on the colours and the shape of an image. Most have one parameter, which random transforms draw.

All arguments and results are uint8 [H, W, 3] or [H, W]. The results are about those of Pillow's ImageOps, ImageEnhance
and Image.transform; tests bound the differences.
"""

from __future__ import annotations

import math

import numpy as np

from libai_data.data.transforms.libraries import opencv

FILL = (128, 128, 128)
"""The colour outside of the image. Source: RandAugment's reference code, augment.py of tensorflow/tpu."""

_LEVELS = np.arange(256)
_SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13


def autocontrast(pixels: np.ndarray) -> np.ndarray:
    """Scale each channel's levels, so that the least one becomes 0 and the largest one 255."""
    tables = []
    for histogram in _histograms(pixels):
        there = np.flatnonzero(histogram)
        low, high = int(there[0]), int(there[-1])
        scale = 255.0 / (high - low) if high > low else 1.0
        offset = -low * scale if high > low else 0.0
        tables.append(_table(np.trunc(_LEVELS * scale + offset)))
    return _looked_up(pixels, tables)


def equalize(pixels: np.ndarray) -> np.ndarray:
    """Change each channel's levels, so that about equally many pixels have each level."""
    tables = []
    for histogram in _histograms(pixels):
        there = histogram[histogram > 0]
        step = int(there.sum() - there[-1]) // 255
        if len(there) <= 1 or not step:
            tables.append(_table(_LEVELS))
        else:
            tables.append(_table((step // 2 + np.concatenate([[0], np.cumsum(histogram)[:-1]])) // step))
    return _looked_up(pixels, tables)


def solarize(pixels: np.ndarray, threshold: int) -> np.ndarray:
    """Invert the levels from `threshold` (0 to 256) up."""
    return _looked_up(pixels, [_table(np.where(threshold <= _LEVELS, 255 - _LEVELS, _LEVELS))])


def posterize(pixels: np.ndarray, bits: int) -> np.ndarray:
    """Keep the upper `bits` (0 to 8) of each level."""
    return _looked_up(pixels, [_table(_LEVELS & (0xFF00 >> bits & 0xFF))])


def brightness(pixels: np.ndarray, factor: float) -> np.ndarray:
    """Blend with black: 0 is black, 1 the image."""
    return _looked_up(pixels, [_table(np.trunc(_LEVELS * factor))])


def contrast(pixels: np.ndarray, factor: float) -> np.ndarray:
    """Blend with the mean level of its greyscale: 0 is grey, 1 the image."""
    mean = int(opencv().mean(_grey(pixels))[0] + 0.5)
    return _looked_up(pixels, [_table(np.trunc(mean + factor * (_LEVELS - mean)))])


def colour(pixels: np.ndarray, factor: float) -> np.ndarray:
    """Blend with its greyscale: 0 is greyscale, 1 the image."""
    if pixels.ndim == 2:
        return pixels
    cv2 = opencv()
    return cv2.addWeighted(pixels, factor, cv2.cvtColor(_grey(pixels), cv2.COLOR_GRAY2RGB), 1 - factor, 0)


def sharpness(pixels: np.ndarray, factor: float) -> np.ndarray:
    """Blend with a smoothed image: 0 is smooth, 1 the image. The outermost pixels stay as they are."""
    if min(pixels.shape[:2]) < 3:
        return pixels
    cv2 = opencv()
    made = cv2.addWeighted(pixels, factor, cv2.filter2D(pixels, -1, _SMOOTH), 1 - factor, 0)
    for border in ((0, slice(None)), (-1, slice(None)), (slice(None), 0), (slice(None), -1)):
        made[border] = pixels[border]
    return made


def hue(pixels: np.ndarray, turn: float) -> np.ndarray:
    """Turn all hues by the fraction `turn` (-0.5 to 0.5) of the colour circle."""
    if pixels.ndim == 2:
        return pixels
    cv2 = opencv()
    coloured = cv2.cvtColor(pixels, cv2.COLOR_RGB2HSV_FULL)
    coloured[:, :, 0] += np.uint8(int(turn * 255) % 256)
    return cv2.cvtColor(coloured, cv2.COLOR_HSV2RGB_FULL)


def rotate(pixels: np.ndarray, degrees: float) -> np.ndarray:
    """Rotate about the centre, counter-clockwise."""
    angle = math.radians(degrees)
    cosine, sine = math.cos(angle), math.sin(angle)
    x, y = pixels.shape[1] / 2, pixels.shape[0] / 2
    return _warped(pixels, (cosine, -sine, x - cosine * x + sine * y), (sine, cosine, y - sine * x - cosine * y))


def shear(pixels: np.ndarray, x: float = 0.0, y: float = 0.0) -> np.ndarray:
    """Take each pixel from the place that is `x` times its row further right, and `y` times its column further down."""
    return _warped(pixels, (1.0, x, 0.0), (y, 1.0, 0.0))


def translate(pixels: np.ndarray, x: float = 0.0, y: float = 0.0) -> np.ndarray:
    """Take each pixel from the place that is `x` times the width further right, and `y` times the height below."""
    return _warped(pixels, (1.0, 0.0, x * pixels.shape[1]), (0.0, 1.0, y * pixels.shape[0]))


Row = tuple[float, float, float]


def _warped(pixels: np.ndarray, x: Row, y: Row) -> np.ndarray:
    """The image whose pixel at (column, row) is taken from (x, y) . (column, row, 1), both counted from edges."""
    cv2 = opencv()
    matrix = np.array([x, y])
    matrix[:, 2] += 0.5 * matrix[:, :2].sum(axis=1) - 0.5
    height, width = pixels.shape[:2]
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    return cv2.warpAffine(pixels, matrix, (width, height), flags=flags, borderValue=FILL)


def _grey(pixels: np.ndarray) -> np.ndarray:
    return pixels if pixels.ndim == 2 else opencv().cvtColor(pixels, opencv().COLOR_RGB2GRAY)


def _histograms(pixels: np.ndarray) -> np.ndarray:
    channels = pixels[None] if pixels.ndim == 2 else opencv().split(pixels)
    return np.stack([opencv().calcHist([channel], [0], None, [256], [0, 256])[:, 0] for channel in channels]).astype(
        int
    )


def _table(levels: np.ndarray) -> np.ndarray:
    return np.clip(levels, 0, 255).astype(np.uint8)


def _looked_up(pixels: np.ndarray, tables: list[np.ndarray]) -> np.ndarray:
    """The image with each level replaced, by one table for all channels or one for each."""
    table = tables[0] if len(tables) == 1 else np.stack(tables, axis=-1)[None]
    return opencv().LUT(pixels, table)
