"""Transforms of other libraries, with what they draw seeded for the sample."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Callable

import numpy as np
from PIL import Image

from libai_data.errors import ConfigError, nearest
from libai_data.sample_random import seeded_globals
from libai_data.transforms.pipeline import RandomTransform, pixels_of

TAKES = ("pillow", "array")
_SEEDS = 1 << 32
_turns = threading.Lock()


class Seeded(RandomTransform):
    """A transform of another library, such as flowvision or torchvision, or of one's own.

    While it runs, Python's, numpy's, torch's and OneFlow's global generators are seeded for the sample, the latter two
    if they are imported; afterwards they are as before. OneFlow's takes 2 ms to put back.

    Args:
        transform: from an image to an image or an array.
        takes: what it takes: a Pillow image, or a uint8 "array".

    Raises:
        ConfigError: `takes` is something else.
    """

    def __init__(self, transform: Callable[[Any], Any], takes: str = "pillow") -> None:
        if takes not in TAKES:
            raise ConfigError(f"takes is {takes!r}; it must be one of {TAKES}.{nearest(takes, TAKES)}")
        self.transform = transform
        self.takes = takes

    def apply(self, image: Any, generator: np.random.Generator) -> Any:
        """Apply the transform."""
        seed = int(generator.integers(_SEEDS))
        while True:
            imported = _imported_frameworks()
            with seeded_globals(seed), _seeded_frameworks(seed):
                made = self.transform(self._as_taken(image))
            # What it has just imported by itself was not seeded.
            if _imported_frameworks() == imported:
                return made

    def _as_taken(self, image: Any) -> Any:
        if self.takes == "array":
            return pixels_of(image)
        return image if isinstance(image, Image.Image) else Image.fromarray(pixels_of(image))


class Albumentations(RandomTransform):
    """A transform of albumentations 2, such as its `Compose`.

    It has generators of its own, which are seeded for each sample (0.3 ms for a few transforms); threads take turns.

    Args:
        transform: takes `image=` and returns a dict with `image`.

    Raises:
        ConfigError: It has no `set_random_seed`, as those of albumentations before 2.0 and single transforms.
    """

    def __init__(self, transform: Any) -> None:
        if not callable(getattr(transform, "set_random_seed", None)):
            raise ConfigError(
                f"{type(transform).__name__} has no set_random_seed; it must be a transform of albumentations 2"
            )
        self.transform = transform

    def apply(self, image: Any, generator: np.random.Generator) -> Any:
        """Apply the transform."""
        pixels = pixels_of(image)
        with _turns:
            self.transform.set_random_seed(int(generator.integers(_SEEDS)))
            return self.transform(image=pixels)["image"]


def _imported_frameworks() -> list[str]:
    return [name for name in ("torch", "oneflow") if name in sys.modules]


@contextmanager
def _seeded_frameworks(seed: int) -> Iterator[None]:
    """Seed the generators of those frameworks that are imported, and put them back afterwards."""
    with ExitStack() as undo:
        torch = sys.modules.get("torch")
        if torch is not None:
            undo.callback(torch.set_rng_state, torch.get_rng_state())
            torch.random.default_generator.manual_seed(seed)
        flow = sys.modules.get("oneflow")
        if flow is not None:
            undo.callback(flow.default_generator.set_state, flow.default_generator.get_state())
            flow.default_generator.manual_seed(seed)
        yield
