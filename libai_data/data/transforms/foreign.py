"""Transforms of other libraries, whose draws are seeded for each sample."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
from PIL import Image

from libai_data.data.fork_lock import ForkLock
from libai_data.data.random.generator_states import present
from libai_data.data.random.global_generators import seeded
from libai_data.data.transforms.pipeline import RandomTransform, pixels_of
from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import check, one_of

_SEEDS = 1 << 32
_lock = ForkLock()


class Seeded(RandomTransform):
    """A transform of another library, such as flowvision or torchvision, or your own.

    While it runs, the global generators of Python, numpy, torch and OneFlow (if imported) are seeded for the sample.
    Afterwards they are restored. Restoring OneFlow's generator takes 2 ms and skips some hundred numbers, because
    OneFlow 0.9 does not show its exact position. A loader does the same for all draws of a dataset, except draws from
    OneFlow, which it cannot watch exactly. Use this class for these draws.

    Args:
        transform: from an image to an image or an array.
        takes: the type of the transform's argument: a "pillow" image, or a uint8 "array".

    Raises:
        ConfigError: `takes` has another value.
    """

    def __init__(self, transform: Callable[[Any], Any], takes: str = "pillow") -> None:
        check({"takes": one_of("pillow", "array")}, takes=takes)
        self.transform = transform
        self.takes = takes

    def apply(self, image: Any, generator: np.random.Generator) -> Any:
        seed = int(generator.integers(_SEEDS))
        while True:
            known = present()
            with seeded(seed):
                made = self.transform(self._as_taken(image))
            # The generator of a library that the transform has just imported was not seeded.
            if present() == known:
                return made

    def _as_taken(self, image: Any) -> Any:
        if self.takes == "array":
            return pixels_of(image)
        return image if isinstance(image, Image.Image) else Image.fromarray(pixels_of(image))


class Albumentations(RandomTransform):
    """A transform of albumentations 2, such as its `Compose`.

    Its own generators are seeded for each sample (0.3 ms for a few transforms). Threads use the transform in turn.

    Args:
        transform: has an argument `image` and returns a dict with `image`.

    Raises:
        ConfigError: `transform` has no `set_random_seed`. Transforms of albumentations before 2.0, and single
            transforms, have none.
    """

    seeds_generators = True

    def __init__(self, transform: Any) -> None:
        if not callable(getattr(transform, "set_random_seed", None)):
            raise ConfigError(
                f"{type(transform).__name__} has no set_random_seed; it must be a transform of albumentations 2"
            )
        self.transform = transform

    def apply(self, image: Any, generator: np.random.Generator) -> Any:
        pixels = pixels_of(image)
        with _lock:
            self.transform.set_random_seed(int(generator.integers(_SEEDS)))
            return self.transform(image=pixels)["image"]
