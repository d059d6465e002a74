"""The transform of an image from pixels to normalised floats."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np

from libai_data.data.transforms.libraries import has_opencv, opencv
from libai_data.errors import ConfigError, SchemaError
from libai_data.errors.argument_rules import check_types


def array_of_image(image: Any) -> np.ndarray:
    """The array of an image in any form; a SchemaError for a Pillow image with a palette: its numbers are no levels."""
    if getattr(image, "mode", "") in ("P", "PA"):
        raise SchemaError(
            f"the image has a palette (mode {image.mode!r}); convert it, as by image.convert('RGB'), or pass "
            "np.asarray(image) if the numbers of its colours are meant, as in a mask"
        )
    return np.asarray(image)


class ImageToFloat:
    """Converts pixels of 0 to 255 to normalised floats: (pixel / 255 - mean) / std.

    Args:
        mean: per channel, or one for all.
        std: per channel, or one for all; above 0.

    Raises:
        ConfigError: A std is not above 0.
    """

    def __init__(self, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)) -> None:
        check_types(ImageToFloat, locals())
        if not len(std) or not all(0 < each < inf for each in std):
            raise ConfigError(f"std is {list(std)}; it must be a finite number above 0 for each channel")
        if not len(mean) or not all(-inf < each < inf for each in mean):
            raise ConfigError(f"mean is {list(mean)}; it must be a finite number for each channel")
        if 1 != len(mean) != len(std) != 1:
            raise ConfigError(
                f"mean has {len(mean)} values, and std has {len(std)}; give one for each channel, or one for all"
            )
        self.mean = np.asarray(mean, dtype=np.float32)
        self.std = np.asarray(std, dtype=np.float32)
        levels = np.arange(256, dtype=np.float32) / np.float32(255)
        channels = max(len(self.mean), len(self.std))
        self._tables = np.ascontiguousarray(
            np.broadcast_to(((levels[:, None] - self.mean) / self.std).T, (channels, 256))
        )

    def __call__(self, image: Any, out: np.ndarray | None = None) -> np.ndarray:
        """Transform an image.

        Args:
            image: a Pillow image or a uint8 array, [H, W] or [H, W, C].
            out: an array for the result, which is used if the result fits.

        Returns:
            float32 [C, H, W].

        Raises:
            SchemaError: The image has a palette, no pixels, or not 8 bits a channel; or mean and std are of another
                number of channels.
        """
        pixels = array_of_image(image)
        if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or not pixels.size:
            raise SchemaError(f"the image is {pixels.dtype} {list(pixels.shape)}; expected uint8 [H, W] or [H, W, C]")
        shape = (1 if pixels.ndim == 2 else pixels.shape[2], *pixels.shape[:2])
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, shape[0]):
                raise SchemaError(
                    f"the image has {shape[0]} channels, but {name} has {len(values)} values; give one for each "
                    "channel, or one for all"
                )
        if out is None or out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
            out = np.empty(shape, np.float32)
        # A table of all levels gives the same numbers as the formula, in a fifth of the time.
        for number, target in enumerate(out):
            table = self._tables[number % len(self._tables)]
            if has_opencv():
                plane = pixels if pixels.ndim == 2 else opencv().extractChannel(pixels, number)
                opencv().LUT(plane, table, dst=target)
            else:
                np.take(table, pixels if pixels.ndim == 2 else pixels[:, :, number], out=target)
        return out
