"""Images: JPEG files decoded, cropped, flipped and normalised, beside Pillow and flowvision, and beside decoding."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from libai_data.data.datasets import ImageFolderDataset
from libai_data.data.sources.image_folder import ImageFolderSource
from libai_data.data.transforms import Compose, ImageToFloat, RandomFlip, RandomResizedCrop
from libai_data.data.transforms.libraries import libjpeg_turbo
from libai_data.structures import DistTensorData, Instance
from tools.benchmarks.peers import BATCH, libai_data_loader, oneflow_loader
from tools.benchmarks.rows import AtLeast, Contender, Measure, Row, Scale, Unavailable
from tools.benchmarks.works import write_photographs

WORKERS = 2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_WORK = "JPEGs of about 500 x 375: decode, RandomResizedCrop 224, flip, normalise"


def rows(scale: Scale) -> list[Row]:
    """The rows of the suite; the files are made here, in `scale.folder`."""
    folder = write_photographs(scale.folder / "photographs", 64 if scale.quick else 2048)
    ours = libai_data_loader(partial(our_dataset, folder), WORKERS, scale.seconds)
    peer = oneflow_loader(partial(FlowvisionPhotographs, folder), WORKERS, scale.seconds)
    alone = Contender("libjpeg-turbo", partial(_decoding_processes, folder, scale.seconds))
    return [
        Row(
            "train-2",
            _WORK,
            str(WORKERS),
            (peer, ours, alone),
            (AtLeast("libai_data", "oneflow", 4), AtLeast("libai_data", "libjpeg-turbo", 0.6)),
        ),
    ]


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
def _decoding_processes(folder: Path, seconds: float) -> Iterator[Measure]:
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
