"""Transforms that crop, resize and flip images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Union

import numpy as np

from libai_data.data.transforms.decode import EncodedImage
from libai_data.data.transforms.libraries import opencv, scratch
from libai_data.data.transforms.pipeline import RandomTransform, pixels_of, size_of
from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import check, check_types, each, real, whole

Size = Union[int, Sequence[int]]

_ATTEMPTS = 10
_LARGEST = 1 << 15
_NO_ALIASING_BELOW = 1.25
_FEW_PIXELS_BELOW = 2.0
_SMOOTHING = 0.42


def resized(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize uint8 [H, W, 3] or [H, W] to (height, width) by linear interpolation, with antialiasing if it shrinks."""
    cv2 = opencv()
    height, width = size
    if pixels.shape[:2] == (height, width):
        return pixels.copy()
    shrinks = max(pixels.shape[0] / height, pixels.shape[1] / width)
    if shrinks <= _NO_ALIASING_BELOW:
        return cv2.resize(pixels, (width, height), interpolation=cv2.INTER_LINEAR)
    if shrinks <= _FEW_PIXELS_BELOW:
        # Smoothing in proportion to the shrinking takes a third of the time of INTER_AREA, and is as close to Pillow.
        smooth = scratch("smooth", pixels.shape)
        border = cv2.BORDER_REPLICATE | cv2.BORDER_ISOLATED
        cv2.GaussianBlur(pixels, (3, 3), _SMOOTHING * math.sqrt(shrinks**2 - 1), dst=smooth, borderType=border)
        return cv2.resize(smooth, (width, height), interpolation=cv2.INTER_LINEAR)
    # INTER_AREA averages only if no side grows.
    least = min(height, pixels.shape[0]), min(width, pixels.shape[1])
    if least != (height, width):
        return resized(resized(pixels, least), size)
    return cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA)


class Resize:
    """Resizes images.

    Args:
        size: pixels of the shorter side (the other side is in proportion), or (height, width).

    Raises:
        ConfigError: A size below 1.
    """

    takes_encoded = True

    def __init__(self, size: Size) -> None:
        pair = _pair(size)
        self.size = pair if isinstance(size, Sequence) else pair[0]

    def __call__(self, image: Any) -> np.ndarray:
        """Resize an image; a JPEG that is not decoded yet is decoded at the scale needed."""
        height, width = size_of(image)
        target = self._target(height, width)
        if isinstance(image, EncodedImage):
            return resized(image.region(0, 0, height, width, target), target)
        return resized(pixels_of(image), target)

    def _target(self, height: int, width: int) -> tuple[int, int]:
        if not isinstance(self.size, int):
            return self.size
        shorter = min(height, width)
        return max(1, height * self.size // shorter), max(1, width * self.size // shorter)


class CenterCrop:
    """Crops the centre of images; smaller images are padded with black.

    Args:
        size: pixels of both sides, or (height, width).

    Raises:
        ConfigError: A size below 1.
    """

    takes_encoded = True

    def __init__(self, size: Size) -> None:
        self.size = _pair(size)

    def __call__(self, image: Any) -> np.ndarray:
        pixels = pixels_of(image)
        height, width = self.size
        missing = max(0, height - pixels.shape[0]), max(0, width - pixels.shape[1])
        if any(missing):
            before = missing[0] // 2, missing[1] // 2
            edges = (before[0], missing[0] - before[0], before[1], missing[1] - before[1])
            pixels = opencv().copyMakeBorder(pixels, *edges, opencv().BORDER_CONSTANT, value=0)
        top, left = (round((found - wanted) / 2) for found, wanted in zip(pixels.shape, self.size))
        return pixels[top : top + height, left : left + width]


class RandomResizedCrop(RandomTransform):
    """Cuts a random region out of images and resizes it. A JPEG is decoded at the scale that the region needs.

    Source: C. Szegedy et al., "Going Deeper with Convolutions" (CVPR 2015), section 6. The defaults, and the region if
    no random one fits, are torchvision's.

    Args:
        size: pixels of both sides of the result, or (height, width).
        scale: least and largest area of the region, as a fraction of the image's area.
        ratio: least and largest width / height of the region; the logarithm is drawn uniformly.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self, size: Size, scale: Sequence[float] = (0.08, 1.0), ratio: Sequence[float] = (3 / 4, 4 / 3)
    ) -> None:
        check_types(RandomResizedCrop, locals())
        self.size = _pair(size)
        self.scale, self.ratio = least_and_largest("scale", scale), least_and_largest("ratio", ratio)

    def apply(self, image: Any, generator: np.random.Generator) -> np.ndarray:
        top, left, height, width = self.region(*size_of(image), generator)
        if isinstance(image, EncodedImage):
            return resized(image.region(top, left, height, width, self.size, rough=True), self.size)
        return resized(pixels_of(image)[top : top + height, left : left + width], self.size)

    def region(self, height: int, width: int, generator: np.random.Generator) -> tuple[int, int, int, int]:
        """Draw top, left, height and width of the region of an image."""
        for own_width, own_height in random_sides(height * width, self.scale, self.ratio, generator):
            if 0 < own_width <= width and 0 < own_height <= height:
                top = int(generator.integers(0, height - own_height + 1))
                return top, int(generator.integers(0, width - own_width + 1)), own_height, own_width
        own_height = min(height, max(1, round(width / self.ratio[0])))
        own_width = min(width, max(1, round(height * self.ratio[1])))
        return (height - own_height) // 2, (width - own_width) // 2, own_height, own_width


class RandomFlip(RandomTransform):
    """Flips images at random.

    Args:
        p: the probability.
        vertical: upside down, instead of left to right.

    Raises:
        ConfigError: `p` is out of range.
    """

    def __init__(self, p: float = 0.5, vertical: bool = False) -> None:
        check_types(RandomFlip, locals())
        self.p = probability(p)
        self.vertical = vertical

    def apply(self, image: Any, generator: np.random.Generator) -> np.ndarray:
        pixels = pixels_of(image)
        return opencv().flip(pixels, 0 if self.vertical else 1) if generator.random() < self.p else pixels


def probability(p: float) -> float:
    """Return a probability; a ConfigError if `p` is none."""
    check({"p": real(0, 1)}, p=p)
    return p


def least_and_largest(name: str, bounds: Sequence[float]) -> tuple[float, float]:
    """Return the bounds [least, largest] of a number; a ConfigError if they are not above 0, or in another order."""
    if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1] < math.inf:
        raise ConfigError(f"{name} is {list(bounds)}; it must be [least, largest], both above 0")
    return float(bounds[0]), float(bounds[1])


def random_sides(
    area: int, scale: tuple[float, float], ratio: tuple[float, float], generator: np.random.Generator
) -> Iterator[tuple[int, int]]:
    """Draw the sides of boxes, for a few attempts: fractions `scale` of an area, the first side `ratio` x the other."""
    for _ in range(_ATTEMPTS):
        own_area = area * generator.uniform(*scale)
        own_ratio = math.exp(generator.uniform(math.log(ratio[0]), math.log(ratio[1])))
        yield round(math.sqrt(own_area * own_ratio)), round(math.sqrt(own_area / own_ratio))


def _pair(size: Size) -> tuple[int, int]:
    one = whole(1, _LARGEST)
    pair = (size, size) if one.accepts(size) else size
    if not each(one, 2).accepts(pair):
        raise ConfigError(f"size is {size!r:.200}; it must be an int of 1 to {_LARGEST}, or (height, width)")
    height, width = pair  # type: ignore[misc]
    return int(height), int(width)  # type: ignore[arg-type]
