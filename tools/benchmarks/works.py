"""The work that is measured, beside the samples of `samples`: its files, and samples for certain loaders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from libai_data.data.transforms.image import ImageToFloat
from libai_data.structures import DistTensorData, Instance
from tools.benchmarks.samples import IMAGE_SHAPE, TOKEN_FIELDS, TOKENS, PlainTokens


def write_tokens(path: Path, samples: int) -> Path:
    """Write uint16 [samples, fields, tokens] of random tokens."""
    tokens = np.random.default_rng(0).integers(0, 50000, (samples, len(TOKEN_FIELDS), TOKENS), dtype=np.uint16)
    tokens.tofile(path)
    return path


def write_images(path: Path, samples: int) -> Path:
    """Write random images, float32 [samples, 3, 224, 224]."""
    np.save(path, np.random.default_rng(0).random((samples, *IMAGE_SHAPE), dtype=np.float32))
    return path


class LongTokens(PlainTokens):
    """The same samples again and again, 10^8 of them."""

    def __len__(self) -> int:
        return 10**8

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return super().__getitem__(index % len(self.array))


class TokenBatches(PlainTokens):
    """The same samples, a whole batch at once."""

    def read_batch(self, indices: np.ndarray, out: dict[str, np.ndarray]) -> None:
        """Gather a batch from the memory map.

        Args:
            indices: int64 [n].
            out: field -> int64 [n, 1024], to be filled.
        """
        samples = self.array[indices]
        for place, name in enumerate(TOKEN_FIELDS):
            out[name][...] = samples[:, place]


class FlowSamples:
    """Samples as LiBai's datasets return them: OneFlow tensors, made of arrays.

    Args:
        samples: dicts of arrays.
    """

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Instance:
        import oneflow as flow

        return Instance(**{name: DistTensorData(flow.tensor(array)) for name, array in self.samples[index].items()})


class ReadyImages:
    """Images float32 [3, 224, 224] that are read for nothing: only memory that was never used is written to.

    Args:
        labels: with a label each.
    """

    def __init__(self, labels: bool = True) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample: dict[str, Any] = {"images": np.ones(IMAGE_SHAPE, np.float32)}
        return {**sample, "labels": index} if self.labels else sample

    def read_batch(self, indices: np.ndarray, out: dict[str, np.ndarray]) -> None:
        """Fill the images when their memory is new, and the labels.

        Args:
            indices: int64 [n].
            out: "images" float32 [n, 3, 224, 224], and "labels" int64 [n].
        """
        if len(indices) and not out["images"][-1, -1, -1, -1]:
            out["images"][...] = 1
        if self.labels:
            out["labels"][...] = indices


class Resized:
    """From a Pillow image of any size to float32 [3, 224, 224]."""

    def __init__(self) -> None:
        self._to_float = ImageToFloat()

    def __call__(self, image: Any) -> np.ndarray:
        """Cut a Pillow image to size."""
        return self._to_float(image.resize(IMAGE_SHAPE[1:]))
