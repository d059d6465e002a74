"""RandAugment: a few operations on each image, all of one magnitude."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

from libai_data.data.transforms import operations
from libai_data.data.transforms.pipeline import RandomTransform, pixels_of
from libai_data.errors.argument_rules import check, real, whole

LARGEST_MAGNITUDE = 10

Operation = Callable[[np.ndarray, float, float], np.ndarray]

OPERATIONS: dict[str, Operation] = {
    "Identity": lambda pixels, strength, sign: pixels,
    "AutoContrast": lambda pixels, strength, sign: operations.autocontrast(pixels),
    "Equalize": lambda pixels, strength, sign: operations.equalize(pixels),
    "Rotate": lambda pixels, strength, sign: operations.rotate(pixels, 30 * strength * sign),
    "Solarize": lambda pixels, strength, sign: operations.solarize(pixels, round(256 * (1 - strength))),
    "Color": lambda pixels, strength, sign: operations.colour(pixels, 1 + 0.9 * strength * sign),
    "Posterize": lambda pixels, strength, sign: operations.posterize(pixels, 8 - round(4 * strength)),
    "Contrast": lambda pixels, strength, sign: operations.contrast(pixels, 1 + 0.9 * strength * sign),
    "Brightness": lambda pixels, strength, sign: operations.brightness(pixels, 1 + 0.9 * strength * sign),
    "Sharpness": lambda pixels, strength, sign: operations.sharpness(pixels, 1 + 0.9 * strength * sign),
    "ShearX": lambda pixels, strength, sign: operations.shear(pixels, x=0.3 * strength * sign),
    "ShearY": lambda pixels, strength, sign: operations.shear(pixels, y=0.3 * strength * sign),
    "TranslateX": lambda pixels, strength, sign: operations.translate(pixels, x=150 / 331 * strength * sign),
    "TranslateY": lambda pixels, strength, sign: operations.translate(pixels, y=150 / 331 * strength * sign),
}
"""The 14 operations of the paper. Each is a function of an image, a strength from 0 to 1, and a sign (1 or -1).

Strength 1 is the end of the range in AutoAugment's table 6. Its largest translation is 150 pixels of images with 331,
and here the same fraction.
"""


class RandAugment(RandomTransform):
    """Applies operations drawn at random, one after the other.

    Source: E. Cubuk et al., "RandAugment: Practical Automated Data Augmentation with a Reduced Search Space" (2019);
    the ranges are from the same authors' "AutoAugment" (CVPR 2019), table 6.

    Args:
        number: number of operations for each image (the paper's N).
        magnitude: magnitude of each operation, 0 to 10 (the paper's M).

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(self, number: int = 2, magnitude: float = 9) -> None:
        check({"number": whole(0, 1000), "magnitude": real(0, LARGEST_MAGNITUDE)}, number=number, magnitude=magnitude)
        self.number = number
        self.magnitude = magnitude

    def apply(self, image: Any, generator: np.random.Generator) -> np.ndarray:
        pixels = pixels_of(image)
        names = list(OPERATIONS)
        for chosen in generator.integers(0, len(names), self.number).tolist():
            sign = 1.0 if generator.random() < 0.5 else -1.0
            pixels = OPERATIONS[names[chosen]](pixels, self.magnitude / LARGEST_MAGNITUDE, sign)
        return pixels
