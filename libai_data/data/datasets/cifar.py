"""CIFAR-10 and CIFAR-100, with LiBai's arguments."""

from __future__ import annotations

from pathlib import Path

from libai_data.data.datasets.labelled_images import LabelledImages, Transform
from libai_data.data.sources.cifar import CIFAR10, CIFAR100, CIFARSource


class CIFAR10Dataset(LabelledImages):
    """CIFAR-10: 32 x 32 pixels in colour, 10 classes.

    Args:
        root: the folder that holds `cifar-10-batches-bin`, the binary version, or is to hold it.
        train: whether to take the images to train with, or those to test with.
        transform: from an image to an array; see `LabelledImages`.
        download: fetch the files if they are not there.
        source_url: of an archive to fetch instead of that of the University of Toronto.

    Raises:
        ConfigError: The files are not there.
        FormatError: A file is truncated or of another format.
        StorageError: The archive cannot be fetched, or is not the published one.
    """

    _kind = CIFAR10

    def __init__(
        self,
        root: str | Path,
        train: bool = True,
        transform: Transform | None = None,
        download: bool = False,
        source_url: str | None = None,
    ) -> None:
        super().__init__(CIFARSource(root, self._kind, train, download, source_url), transform)


class CIFAR100Dataset(CIFAR10Dataset):
    """CIFAR-100: 32 x 32 pixels in colour, 100 classes; the folder is `cifar-100-binary`. See `CIFAR10Dataset`."""

    _kind = CIFAR100
