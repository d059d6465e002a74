"""ImageNet's archives in their published form, read without unpacking.

ILSVRC2012_img_train.tar contains one archive per class, `n01440764.tar` and so on. ILSVRC2012_img_val.tar contains the
images themselves, and a text file lists their classes. Source: O. Russakovsky et al., "ImageNet Large Scale Visual
Recognition Challenge" (IJCV 2015), and the development kit of 2012.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from libai_data.data.files.identity import file_identity, key_of
from libai_data.data.files.index_cache import cached_arrays
from libai_data.data.progress_bar import progress_bar
from libai_data.data.sources.mapped_file import MappedFile
from libai_data.data.sources.packed_names import PackedNames
from libai_data.data.sources.paths import check_is_file, checked_path, is_file, text_of
from libai_data.data.sources.record_index import index_folder
from libai_data.data.sources.tar_index import TarIndex, index_tar
from libai_data.errors import FormatError
from libai_data.errors.argument_rules import FLAG, check

TRAIN_TAR, VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
VAL_LABELS = "imagenet_2012_validation_synset_labels.txt"


class ImageNetTarSource:
    """Images of ImageNet's archives; classes are numbered in the order of their names, as in folders.

    One process of a node finds the places of the images once, with a progress bar. The places are cached.

    Args:
        root: the folder of the archives.
        train: True to read ILSVRC2012_img_train.tar, False to read ILSVRC2012_img_val.tar.
        val_labels: file with the classes of the validation images. Each line has a class (n01440764), in the order of
            the images' names, or a name and its class. Default: `imagenet_2012_validation_synset_labels.txt` in `root`.
        cache_dir: folder for the places; by default `indices` in the folder that LIBAI_DATA_CACHE_DIR names.

    Attributes:
        classes: names of the classes.

    Raises:
        ConfigError: A file is missing.
        FormatError: A file is truncated, of another format, or does not fit the others.
    """

    def __init__(
        self,
        root: str | Path,
        train: bool = True,
        val_labels: str | Path | None = None,
        cache_dir: str | Path | None = None,
    ) -> None:
        check({"train": FLAG}, train=train)
        root = checked_path("root", root)
        self.path = root / (TRAIN_TAR if train else VAL_TAR)
        folder = root / ("train" if train else "val")
        check_is_file(self.path, f", and no folder {folder}; put one of them there, or give another root")
        self._file = MappedFile(self.path)
        kept_in = index_folder(cache_dir, None, "")
        self._paths, key = [self.path], key_of("imagenet", train, self._file.identity)
        if train:
            found = cached_arrays(kept_in, key, lambda: _index_of_classes(self.path))
            self.classes = tuple(PackedNames.from_numbers(found[0], found[1]))
            self._labels, self._index = found[2], TarIndex.from_numbers(found[3:])
        else:
            self._index = TarIndex.from_numbers(cached_arrays(kept_in, key, lambda: index_tar(self.path).numbers()))
            if not len(self._index):
                raise FormatError(f"{self.path} contains no files; it is not ImageNet's {VAL_TAR}")
            labels = root / VAL_LABELS if val_labels is None else checked_path("val_labels", val_labels)
            of_images = _classes_of(labels, list(self._index.names))
            self._paths.append(labels)
            train_tar = root / TRAIN_TAR
            self.classes = _classes_in(train_tar) if is_file(train_tar) else tuple(sorted(set(of_images)))
            self._labels = _numbered(of_images, self.classes, labels)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def identity(self) -> list[Any]:
        """The identity of the archive and of the file of labels as they are now; see `data.files.identity`."""
        return [file_identity(path) for path in self._paths]

    def read(self, index: int) -> tuple[bytes, int]:
        """The encoded image in the archive, and its label."""
        place = operator.index(index)
        start = int(self._index.offsets[place])
        return self._file.bytes[start : start + int(self._index.sizes[place])], int(self._labels[place])

    def name(self, index: int) -> str:
        """Where an image is, for messages: its name, and the archive."""
        return f"{self._index.names[index]} in {self.path}"

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint stores to identify the data: the number of images, and a hash of names and labels."""
        digest = hashlib.blake2b(digest_size=12)
        for numbers in (self._labels, *self._index.names.numbers()):
            digest.update(numbers.tobytes())
        return {"images": len(self), "names": digest.hexdigest()}


def _classes_in(path: Path) -> tuple[str, ...]:
    return tuple(sorted(name[: -len(".tar")] for name in index_tar(path).names if name.endswith(".tar")))


def _index_of_classes(path: Path) -> list[np.ndarray]:
    """Int64 vectors: the names of the classes (two vectors), the label of each image, and the index of the images."""
    outer = index_tar(path)
    places = {name[: -len(".tar")]: place for place, name in enumerate(outer.names) if name.endswith(".tar")}
    if not places:
        raise FormatError(f"{path} contains no archives of classes (n01440764.tar); it is not ImageNet's {TRAIN_TAR}")
    classes = sorted(places)
    found = []
    for name in progress_bar(classes, f"Indexing {path}", unit=" classes", disable=None):
        start, size = int(outer.offsets[places[name]]), int(outer.sizes[places[name]])
        found.append(index_tar(path, start, start + size))
    images = TarIndex(
        PackedNames.of(name for index in found for name in index.names),
        np.concatenate([index.offsets for index in found]),
        np.concatenate([index.sizes for index in found]),
    )
    labels = np.repeat(np.arange(len(classes)), [len(index) for index in found])
    return [*PackedNames.of(classes).numbers(), labels, *images.numbers()]


def _classes_of(path: Path, images: Sequence[str]) -> list[str]:
    """The class of each image, read from a file of labels."""
    check_is_file(path, ", which lists the classes of the validation images; give its path as val_labels")
    lines = [line.split() for line in text_of(path).splitlines() if line.strip()]
    if len(lines) != len(images) or len({len(line) for line in lines}) != 1 or len(lines[0]) > 2:
        raise FormatError(
            f"{path} has {len(lines)} lines for {len(images)} images; expected a class, or an image and its class, "
            "in each line"
        )
    if len(lines[0]) == 1:
        by_name = dict(zip(sorted(images), (line[0] for line in lines)))
    else:
        by_name = {line[0]: line[1] for line in lines}
    missing: str | None = next((image for image in images if image not in by_name), None)
    if missing is not None:
        raise FormatError(f"{path} has no line for {missing}")
    return [by_name[image] for image in images]


def _numbered(of_images: Sequence[str], classes: Sequence[str], path: Path) -> np.ndarray:
    numbers = {name: number for number, name in enumerate(classes)}
    unknown = next((name for name in of_images if name not in numbers), None)
    if unknown is not None:
        raise FormatError(f"{path} names the class {unknown}, which {TRAIN_TAR} does not have")
    return np.array([numbers[name] for name in of_images], np.int64)
