"""Random changes of colour, and random erasing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from libai_data.data.transforms import operations
from libai_data.data.transforms.geometry import least_and_largest, probability, random_sides
from libai_data.data.transforms.pipeline import RandomTransform, pixels_of
from libai_data.errors import ConfigError, SchemaError
from libai_data.errors.argument_rules import check, check_types, real


class ColorJitter(RandomTransform):
    """Changes brightness, contrast, saturation and hue by random amounts, in random order; as torchvision's.

    Args:
        brightness, contrast, saturation: factors are drawn from max(0, 1 - value) to 1 + value.
        hue: turns are drawn from -hue to hue of the colour circle; at most 0.5.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self, brightness: float = 0.0, contrast: float = 0.0, saturation: float = 0.0, hue: float = 0.0
    ) -> None:
        rules = {"hue": real(0, 0.5), **dict.fromkeys(("brightness", "contrast", "saturation"), real(0, 1e9))}
        check(rules, brightness=brightness, contrast=contrast, saturation=saturation, hue=hue)
        self._changes: list[tuple[Callable[[np.ndarray, float], np.ndarray], float, float]] = [
            (operation, max(0.0, 1 - value), 1 + value)
            for operation, value in (
                (operations.brightness, brightness),
                (operations.contrast, contrast),
                (operations.colour, saturation),
            )
            if value
        ]
        if hue:
            self._changes.append((operations.hue, -hue, hue))

    def apply(self, image: Any, generator: np.random.Generator) -> np.ndarray:
        pixels = pixels_of(image)
        for number in generator.permutation(len(self._changes)).tolist():
            operation, least, largest = self._changes[number]
            pixels = operation(pixels, generator.uniform(least, largest))
        return pixels


class RandomErasing(RandomTransform):
    """Fills a random box of images.

    Source: Z. Zhong et al., "Random Erasing Data Augmentation" (AAAI 2020), algorithm 1.

    Args:
        p: the probability.
        scale: least and largest area of the box, as a fraction of the image's area.
        ratio: least and largest height / width of the box; the logarithm is drawn uniformly.
        value: fills the box: a number, one for each channel, or "random" for noise (uniform levels in uint8, standard
            normal numbers in float32).

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        p: float = 0.5,
        scale: Sequence[float] = (0.02, 0.33),
        ratio: Sequence[float] = (0.3, 3.3),
        value: float | Sequence[float] | str = 0.0,
    ) -> None:
        check_types(RandomErasing, locals())
        self.p = probability(p)
        if isinstance(value, str) and value != "random":
            raise ConfigError(f"value is {value!r}; it must be a number, one for each channel, or 'random'")
        self.scale, self.ratio = least_and_largest("scale", scale), least_and_largest("ratio", ratio)
        self.value = value

    def apply(self, image: Any, generator: np.random.Generator) -> np.ndarray:
        """Fill a box of an image with probability `p`; the image may also be float32 [C, H, W] (see `ImageToFloat`)."""
        is_float = isinstance(image, np.ndarray) and image.dtype == np.float32 and image.ndim == 3
        pixels = image if is_float else pixels_of(image)
        if generator.random() >= self.p:
            return pixels
        height, width = pixels.shape[1:] if is_float else pixels.shape[:2]
        for own_height, own_width in random_sides(height * width, self.scale, self.ratio, generator):
            if 0 < own_height < height and 0 < own_width < width:
                top = int(generator.integers(0, height - own_height + 1))
                left = int(generator.integers(0, width - own_width + 1))
                erased = pixels.copy()
                rows, columns = slice(top, top + own_height), slice(left, left + own_width)
                target = erased[:, rows, columns] if is_float else erased[rows, columns]
                target[...] = self._filling(target, is_float, generator)
                return erased
        return pixels

    def _filling(self, target: np.ndarray, is_float: bool, generator: np.random.Generator) -> Any:
        if isinstance(self.value, str):
            if is_float:
                return generator.standard_normal(target.shape, dtype=np.float32)
            return generator.integers(0, 256, target.shape, dtype=np.uint8)
        value = np.asarray(self.value)
        channels = target.shape[0] if is_float else 1 if target.ndim == 2 else target.shape[2]
        if value.size not in (1, channels):
            raise SchemaError(
                f"value has {value.size} numbers, but the image has {channels} channels; give one for each"
            )
        if not is_float and not ((value >= 0) & (value <= 255)).all():
            raise SchemaError(f"value is {self.value}, but the levels of a uint8 image are 0 to 255")
        return value.reshape(-1, 1, 1) if is_float else value
