"""Datasets of labelled images: folders, ImageNet, and CIFAR and MNIST with LiBai's arguments."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Callable

import numpy as np

from libai_data.data.datasets.labelled_images import ImageSource, LabelledImages, Transform
from libai_data.data.sources.cifar import CIFAR10, CIFAR100, CIFARSource
from libai_data.data.sources.image_folder import ImageFolderSource, classes_in
from libai_data.data.sources.imagenet_tar import ImageNetTarSource
from libai_data.data.sources.mnist import FASHION_MNIST, MNIST, MNISTSource
from libai_data.data.sources.paths import checked_path
from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import FLAG, check


class ImageFolderDataset(LabelledImages):
    """Images of `<root>/<class>/<name>.png` with their class numbers.

    Args:
        root: the folder.
        transform: function from an image to an array; see `LabelledImages`.
        mode: "RGB", or "L" for greyscale; images are converted to it.
        cache_dir: folder for the list of a large folder's files; see `ImageFolderSource`.
        target_transform: function from a class number to the label; see `LabelledImages`.
        nested: "error" or "merge", for folders within the folder of a class; see `ImageFolderSource`.

    Raises:
        ConfigError: The folder does not exist, has no images, has images in nested folders, or cannot be listed.
    """

    source: ImageFolderSource

    def __init__(
        self,
        root: str | Path,
        transform: Transform | None = None,
        mode: str = "RGB",
        cache_dir: str | Path | None = None,
        target_transform: Transform | None = None,
        nested: str = "error",
    ) -> None:
        source = ImageFolderSource(root, cache_dir=cache_dir, nested=nested)
        super().__init__(source, transform, mode, target_transform)

    @property
    def targets(self) -> np.ndarray:
        """The class number of each image, int64 [images]."""
        return self.source.labels


class ImageNetDataset(LabelledImages):
    """ImageNet 2012, from folders `<root>/{train,val}/n01440764/*.JPEG`, or from the published archives.

    Args:
        root: the folder with `train` and `val`, or with ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar.
        train: True for the training images, False for the validation images.
        transform: function from an image to an array; see `LabelledImages`.
        val_labels: file with the classes of the validation archive's images; see `ImageNetTarSource`.
        cache_dir: folder for the list of the images; see `ImageFolderSource`.

    Raises:
        ConfigError: There are neither folders nor archives, or the folders `train` and `val` have different classes.
        FormatError: An archive is broken.
    """

    def __init__(
        self,
        root: str | Path,
        train: bool = True,
        transform: Transform | None = None,
        val_labels: str | Path | None = None,
        cache_dir: str | Path | None = None,
    ) -> None:
        check({"train": FLAG}, train=train)
        folder = checked_path("root", root) / ("train" if train else "val")
        source: ImageSource
        if os.path.isdir(folder):
            source = ImageFolderSource(folder, cache_dir=cache_dir)
            _check_same_classes(source, checked_path("root", root) / ("val" if train else "train"))
        else:
            source = ImageNetTarSource(root, train, val_labels, cache_dir)
        super().__init__(source, transform)


def _check_same_classes(source: ImageFolderSource, other: Path) -> None:
    """Refuse two folders of which one lacks a class, because the same class would have two numbers."""
    if not os.path.isdir(other):
        return
    there = set(classes_in(other))
    differing = sorted(there ^ set(source.classes))
    if differing:
        name = differing[0]
        has, lacks = (other, source.root) if name in there else (source.root, other)
        raise ConfigError(
            f"{has} has the class {name!r}, but {lacks} does not ({len(differing)} such classes), so the same class "
            "would have two numbers; make an empty folder for each missing class, or remove what is no class"
        )


class PublishedImages(LabelledImages):
    """Base of the data sets that are downloaded as a whole, with LiBai's arguments.

    Args:
        root: the folder that contains the data set's own folder; a download creates this folder.
        train: True for the training images, False for the validation images.
        transform: function from an image to an array; see `LabelledImages`.
        download: download the files if they do not exist.
        source_url: another address for the download: an archive (CIFAR), or a folder with "/" at its end (MNIST).

    Raises:
        ConfigError: The files do not exist.
        FormatError: A file is truncated or of another format.
        StorageError: A file cannot be downloaded, or differs from the published file.
    """

    _source: Callable[..., ImageSource]
    _mode = "RGB"

    def __init__(
        self,
        root: str | Path,
        train: bool = True,
        transform: Transform | None = None,
        download: bool = False,
        source_url: str | None = None,
    ) -> None:
        source = self._source(root, train=train, download=download, source_url=source_url)
        super().__init__(source, transform, self._mode)


class CIFAR10Dataset(PublishedImages):
    """CIFAR-10, the binary version in `cifar-10-batches-bin`: 32 x 32 pixels in colour, 10 classes."""

    _source = partial(CIFARSource, kind=CIFAR10)


class CIFAR100Dataset(PublishedImages):
    """CIFAR-100, the binary version in `cifar-100-binary`: 32 x 32 pixels in colour, 100 classes."""

    _source = partial(CIFARSource, kind=CIFAR100)


class MNISTDataset(PublishedImages):
    """MNIST, gzipped or not, in `MNIST/raw` or `root` itself: 28 x 28 pixels in grey, 10 digits."""

    _source, _mode = partial(MNISTSource, kind=MNIST), "L"


class FashionMNISTDataset(PublishedImages):
    """Fashion-MNIST, gzipped or not, in `FashionMNIST/raw` or `root` itself: 28 x 28 pixels in grey, 10 classes."""

    _source, _mode = partial(MNISTSource, kind=FASHION_MNIST), "L"
