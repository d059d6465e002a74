"""Photographs as JPEG files: made, read by this project and by flowvision, and only decoded."""

from __future__ import annotations

import importlib
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from libai_data.data.datasets import ImageFolderDataset
from libai_data.data.sources.image_folder import ImageFolderSource
from libai_data.data.transforms import Compose, ImageToFloat, RandomFlip, RandomResizedCrop
from libai_data.data.transforms.libraries import libjpeg_turbo
from libai_data.structures import DistTensorData, Instance
from tools.benchmarks.peer_loaders import WORKERS
from tools.benchmarks.rows import Measure, Unavailable
from tools.benchmarks.samples import MEAN, STD
from tools.benchmarks.timing import BATCH

_OF_SKIMAGE = ("astronaut", "chelsea", "coffee", "rocket")


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


def our_dataset(folder: Path) -> ImageFolderDataset:
    """The files, transformed by this project."""
    return ImageFolderDataset(folder, Compose([RandomResizedCrop(224), RandomFlip(), ImageToFloat(MEAN, STD)]))


class FlowvisionPhotographs:
    """The files, opened by Pillow and transformed by flowvision, as in LiBai's ImageNet config.

    Args:
        folder: of the files.
    """

    def __init__(self, folder: Path) -> None:
        import oneflow  # noqa: F401  # needed before flowvision

        try:
            from flowvision import transforms
        except ImportError:
            raise Unavailable("flowvision is not installed") from None
        self.source = ImageFolderSource(folder)
        self.transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(224),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Instance:
        """The sample, as OneFlow tensors."""
        import oneflow as flow
        from PIL import Image

        path, label = self.source[index]
        with Image.open(path) as image:
            pixels = self.transform(image.convert("RGB"))
        return Instance(
            images=DistTensorData(pixels), labels=DistTensorData(flow.tensor(label, dtype=flow.long), placement_idx=-1)
        )


@contextmanager
def decoding_processes(folder: Path, seconds: float) -> Iterator[Measure]:
    """libjpeg-turbo alone, in as many processes as the loader has workers."""
    source = ImageFolderSource(folder)
    paths = [str(source[index][0]) for index in range(len(source))]
    # Not forks, since OneFlow's threads may run by now.
    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
        shares = [paths[worker::WORKERS] for worker in range(WORKERS)]
        list(pool.map(_seconds_an_image, shares, [0.01] * WORKERS))

        def measure() -> float:
            rates = [1 / each for each in pool.map(_seconds_an_image, shares, [seconds] * WORKERS)]
            return BATCH / sum(rates)

        yield measure


def _seconds_an_image(paths: list[str], seconds: float) -> float:
    """Read files and decode them in full, for some seconds."""
    decode = libjpeg_turbo().decode_jpeg
    start, images = time.perf_counter(), 0
    while True:
        with open(paths[images % len(paths)], "rb") as file:
            decode(file.read())
        images += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return elapsed / images
