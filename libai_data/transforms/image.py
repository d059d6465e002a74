"""Transforms of one image."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from libai_data.errors import ConfigError, SchemaError


class ImageToFloat:
    """From pixels of 0 to 255 to normalised floats: (pixel / 255 - mean) / std.

    Args:
        mean: per channel, or one for all.
        std: per channel, or one for all; above 0.

    Raises:
        ConfigError: A std is not above 0.
    """

    def __init__(self, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)) -> None:
        if min(std) <= 0:
            raise ConfigError(f"std is {list(std)}; every channel's must be above 0")
        self.mean = np.asarray(mean, dtype=np.float32)[:, None, None]
        self.std = np.asarray(std, dtype=np.float32)[:, None, None]

    def __call__(self, image: Any) -> np.ndarray:
        """Transform an image.

        Args:
            image: a Pillow image or a uint8 array, [H, W] or [H, W, C].

        Returns:
            float32 [C, H, W].

        Raises:
            SchemaError: Other than 8 bits a channel, or another number of channels than mean and std have.
        """
        pixels = np.asarray(image)
        if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3):
            raise SchemaError(f"the image is {pixels.dtype} {list(pixels.shape)}; expected uint8 [H, W] or [H, W, C]")
        channels_first = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, len(channels_first)):
                raise SchemaError(
                    f"the image has {len(channels_first)} channels, but {name} has {len(values)} values; give one for "
                    "each channel, or one for all"
                )
        return (channels_first.astype(np.float32) / np.float32(255) - self.mean) / self.std
