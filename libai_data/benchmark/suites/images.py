"""Images: JPEG files decoded, cropped, flipped and normalised, beside Pillow and flowvision, and beside decoding."""

from __future__ import annotations

import importlib
import io
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Callable

import numpy as np

from libai_data.benchmark.claims import AtLeast
from libai_data.benchmark.peers import BATCH, libai_data_loader, oneflow_loader
from libai_data.benchmark.rounds import Contender, Measure, Row, Scale, Unavailable
from libai_data.datasets import ImageFolderDataset
from libai_data.sources.image_folder import ImageFolderSource
from libai_data.structures import DistTensorData, Instance
from libai_data.transforms import Compose, ImageToFloat, RandomFlip, RandomResizedCrop
from libai_data.transforms.libraries import libjpeg_turbo, opencv

WORKERS = 2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_OF_SKIMAGE = ("astronaut", "chelsea", "coffee", "rocket")
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
        Row(
            "decoders",
            "the same files decoded in full, one core",
            "0",
            tuple(_decoder(name, decode, folder, scale.seconds) for name, decode in DECODERS.items()),
            (AtLeast("simplejpeg", "opencv"), AtLeast("simplejpeg", "pillow")),
        ),
    ]


def write_photographs(root: Path, count: int) -> Path:
    """Cut photographs into pieces and save them as JPEG files of about 500 x 375 pixels, in one folder a photograph."""
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
    from sklearn.datasets import load_sample_images

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


def _by_opencv(data: bytes) -> np.ndarray:
    cv2 = opencv()
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)


def _by_pillow(data: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


DECODERS: dict[str, Callable[[bytes], np.ndarray]] = {
    "simplejpeg": lambda data: libjpeg_turbo().decode_jpeg(data),
    "opencv": _by_opencv,
    "pillow": _by_pillow,
}


def _decoder(name: str, decode: Callable[[bytes], np.ndarray], folder: Path, seconds: float) -> Contender:
    @contextmanager
    def opened() -> Iterator[Measure]:
        source = ImageFolderSource(folder)
        files = [source[index][0].read_bytes() for index in range(min(64, len(source)))]

        def measure() -> float:
            start, images = time.perf_counter(), 0
            while True:
                for data in files:
                    decode(data)
                images += len(files)
                elapsed = time.perf_counter() - start
                if elapsed >= seconds:
                    return elapsed / images

        yield measure

    return Contender(name, opened)
