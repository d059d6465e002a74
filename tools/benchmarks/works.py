"""The work that is measured: tokens from a memory map, images from memory, photographs from disk."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from libai_data.data.transforms.image import ImageToFloat
from libai_data.structures import DistTensorData, Instance
from tools.benchmarks.rows import Unavailable

TOKEN_FIELDS = ("input_ids", "position_ids", "loss_mask", "labels")
TOKENS = 1024
IMAGE_SHAPE = (3, 224, 224)
PICTURES = "pictures"
_OF_SKIMAGE = ("astronaut", "chelsea", "coffee", "rocket")


def write_tokens(path: Path, samples: int) -> Path:
    """Write uint16 [samples, fields, tokens] of random tokens."""
    tokens = np.random.default_rng(0).integers(0, 50000, (samples, len(TOKEN_FIELDS), TOKENS), dtype=np.uint16)
    tokens.tofile(path)
    return path


def map_tokens(path: Path) -> np.ndarray:
    """The tokens of a file, uint16 [samples, fields, tokens], as a plain array over the memory map."""
    return np.asarray(np.memmap(path, dtype=np.uint16, mode="r").reshape(-1, len(TOKEN_FIELDS), TOKENS))


class Tokens:
    """Four fields int64 [1024] a sample, as a user writes them.

    Args:
        tokens: uint16 [samples, fields, tokens].
        length: samples it claims to have, by repeating its own; by default those it has.
    """

    def __init__(self, tokens: np.ndarray, length: int = 0) -> None:
        self.tokens = tokens
        self.length = length or len(tokens)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Instance:
        return Instance(**{name: self.layout(array) for name, array in self.arrays(index).items()})

    def arrays(self, index: int) -> dict[str, np.ndarray]:
        """The bare arrays of a sample, int64 [1024] each."""
        sample = self.tokens[index % len(self.tokens)]
        return {name: sample[place].astype(np.int64) for place, name in enumerate(TOKEN_FIELDS)}

    def layout(self, tensor: Any) -> DistTensorData:
        """A field as the dataset returns it."""
        return DistTensorData(tensor)


class TokenBatches(Tokens):
    """The same samples, a whole batch at once."""

    def read_batch(self, indices: np.ndarray, out: dict[str, np.ndarray]) -> None:
        """Gather a batch from the memory map.

        Args:
            indices: int64 [n].
            out: field -> int64 [n, 1024], to be filled.
        """
        samples = self.tokens[indices]
        for place, name in enumerate(TOKEN_FIELDS):
            out[name][...] = samples[:, place]


class FlowTokens(Tokens):
    """The same samples as LiBai's datasets return them: OneFlow tensors, made of arrays."""

    def layout(self, tensor: Any) -> DistTensorData:
        import oneflow as flow

        return DistTensorData(flow.tensor(tensor))


class Images:
    """An image float32 [3, 224, 224] and a label, from memory.

    Args:
        images: float32 [samples, 3, 224, 224].
        labels: int64 [samples].
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Instance:
        arrays = self.arrays(index)
        return Instance(images=DistTensorData(arrays["images"]), labels=DistTensorData(arrays["labels"]))

    def arrays(self, index: int) -> dict[str, np.ndarray]:
        """The bare arrays of a sample: a view of the image, and its label, 0-d."""
        return {"images": self.images[index], "labels": self.labels[index]}


class FlowImages(Images):
    """The same samples as LiBai's datasets return them."""

    def __getitem__(self, index: int) -> Instance:
        import oneflow as flow

        image = DistTensorData(flow.tensor(self.images[index]))
        return Instance(images=image, labels=DistTensorData(flow.tensor(self.labels[index]), placement_idx=-1))


def make_images(samples: int) -> Images:
    """Random images, all in memory."""
    random = np.random.default_rng(0)
    images = random.random((samples, *IMAGE_SHAPE), dtype=np.float32)
    return Images(images, random.integers(0, 1000, samples))


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


def write_photographs(root: Path, count: int) -> Path:
    """Cut photographs into pieces and save them as JPEG files of about 500 x 375 pixels, in one folder a photograph.

    Raises:
        Unavailable: scikit-learn is not installed.
    """
    from PIL import Image

    random = np.random.default_rng(0)
    photographs = _photographs()
    for number in range(count):
        label = number % len(photographs)
        image = photographs[label]
        # Pieces of 60 to 100 % of the photograph, in any ratio between 5 : 4 and 3 : 2.
        ratio = random.uniform(1.25, 1.5)
        height = int(min(image.shape[0], image.shape[1] / ratio) * random.uniform(0.6, 1))
        width = int(height * ratio)
        top, left = (int(random.integers(0, whole - own + 1)) for whole, own in zip(image.shape, (height, width)))
        piece = Image.fromarray(image[top : top + height, left : left + width])
        size = int(375 * random.uniform(0.9, 1.1) * ratio), int(375 * random.uniform(0.9, 1.1))
        path = root / f"class{label}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        piece.resize(size, Image.Resampling.BICUBIC).save(path, quality=90)
    return root


def _photographs() -> list[np.ndarray]:
    """Those of scikit-learn and, if it is installed, of scikit-image; uint8 [H, W, 3] each."""
    try:
        from sklearn.datasets import load_sample_images
    except ModuleNotFoundError as error:
        raise Unavailable("scikit-learn is not installed") from error
    found = [np.asarray(image) for image in load_sample_images().images]
    try:
        data = importlib.import_module("skimage.data")
    except ImportError:
        return found
    return [*found, *(getattr(data, name)() for name in _OF_SKIMAGE)]
