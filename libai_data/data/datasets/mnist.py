"""MNIST and Fashion-MNIST, with LiBai's arguments."""

from __future__ import annotations

from pathlib import Path

from libai_data.data.datasets.labelled_images import LabelledImages, Transform
from libai_data.data.sources.mnist import FASHION_MNIST, MNIST, MNISTSource


class MNISTDataset(LabelledImages):
    """MNIST: 28 x 28 pixels in grey, 10 digits.

    Args:
        root: the folder that holds `MNIST/raw` with the four files, gzipped or not, or is to hold it; or that of the
            files themselves.
        train: whether to take the images to train with, or those to test with.
        transform: from an image to an array; see `LabelledImages`.
        download: fetch the files if they are not there.
        source_url: the folder to fetch them from instead, with "/" at its end.

    Raises:
        ConfigError: The files are not there.
        FormatError: A file is truncated or of another format.
        StorageError: A file cannot be fetched, or is not the published one.
    """

    _kind = MNIST

    def __init__(
        self,
        root: str | Path,
        train: bool = True,
        transform: Transform | None = None,
        download: bool = False,
        source_url: str | None = None,
    ) -> None:
        super().__init__(MNISTSource(root, self._kind, train, download, source_url), transform, mode="L")


class FashionMNISTDataset(MNISTDataset):
    """Fashion-MNIST: 28 x 28 pixels in grey, 10 kinds of clothes; the folder is `FashionMNIST/raw`."""

    _kind = FASHION_MNIST
