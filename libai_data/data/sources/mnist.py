"""MNIST, Fashion-MNIST and others in the same files, called IDX.

Source: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits", whose page describes the format: two
bytes of zero, one for the type of the numbers (8 for unsigned bytes), one for the number of dims, the size of each dim
as a big-endian integer of 4 bytes, and the numbers. H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST" (2017).
"""

from __future__ import annotations

import gzip
import operator
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from libai_data.atomic_files import written_together
from libai_data.errors import ConfigError, FormatError
from libai_data.data.files.file_map import FileMap
from libai_data.data.files.identity import file_identity
from libai_data.data.sources.download import downloaded

_BYTES = 8
# Nothing in MNIST's form is larger; a gzip file may claim to be.
_LARGEST = 1 << 32


@dataclass(frozen=True)
class MNISTKind:
    """One of the data sets.

    Attributes:
        folder: of the files, within that of all data.
        mirrors: where the files are published.
        md5: of the compressed files, by name without ".gz".
        classes: names of the classes.
    """

    folder: str
    mirrors: tuple[str, ...]
    md5: dict[str, str]
    classes: tuple[str, ...]


_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
MNIST = MNISTKind(
    folder="MNIST/raw",
    mirrors=("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
    md5=dict(
        zip(
            _NAMES,
            (
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "9fb629c4189551a2d022fa330f9573f3",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
        )
    ),
    classes=tuple("0123456789"),
)
FASHION_MNIST = MNISTKind(
    folder="FashionMNIST/raw",
    mirrors=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    md5=dict(
        zip(
            _NAMES,
            (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
        )
    ),
    classes=(
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
)


class MNISTSource:
    """Images of MNIST and its like; files that are not compressed are memory-mapped.

    Args:
        root: the folder that holds `MNIST/raw` or `FashionMNIST/raw`, or is to hold it; or that of the files
            themselves.
        kind: `MNIST` or `FASHION_MNIST`.
        train: whether to take the images to train with, or those to test with.
        download: fetch the files if they are not there.
        source_url: the folder to fetch them from instead, with "/" at its end.

    Attributes:
        classes: names of the classes.

    Raises:
        ConfigError: The files are not there.
        FormatError: A file is truncated or of another format, or the two do not fit together.
        StorageError: A file cannot be fetched, or is not the published one.
    """

    def __init__(
        self,
        root: str | Path,
        kind: MNISTKind,
        train: bool = True,
        download: bool = False,
        source_url: str | None = None,
    ) -> None:
        self.classes = kind.classes
        folder = Path(root) / kind.folder
        if download and not all(_found(folder, name) for name in kind.md5):
            _download(kind, folder, (source_url,) if source_url else kind.mirrors)
        names = _NAMES[:2] if train else _NAMES[2:]
        self._paths = [_found(folder, name) or _found(Path(root), name) or folder / name for name in names]
        for path in self._paths:
            if not path.is_file():
                raise ConfigError(f"there is no {path}, nor {path.name}.gz; give download=True, or put the file there")
        self._images, self._labels = read_idx(self._paths[0], 3), read_idx(self._paths[1], 1)
        if len(self._images) != len(self._labels):
            raise FormatError(
                f"{self._paths[0]} has {len(self._images)} images, and {self._paths[1]} {len(self._labels)} labels"
            )

    def __len__(self) -> int:
        return len(self._images)

    @property
    def identity(self) -> list[Any]:
        """The identity of the two files as they are now; see `libai_data.data.files.identity`."""
        return [file_identity(path) for path in self._paths]

    def read(self, index: int) -> tuple[np.ndarray, int]:
        """An image, uint8 [28, 28], and its label.

        Raises:
            FormatError: There is no class of its label.
        """
        place = operator.index(index)
        label = int(self._labels[place])
        if label >= len(self.classes):
            raise FormatError(f"label {label} of {self.name(place)}; there are {len(self.classes)} classes")
        return np.array(self._images[place]), label

    def name(self, index: int) -> str:
        """Where an image lies: its file and its number there."""
        return f"image {index} of {self._paths[0]}"

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint keeps: the file's name and its number of images."""
        return {self._paths[0].name.replace(".gz", ""): len(self)}


def read_idx(path: Path, dims: int) -> np.ndarray:
    """The unsigned bytes of an IDX file, gzipped or not.

    Args:
        path: of the file.
        dims: how many dims there must be.

    Returns:
        uint8 [...], read-only.

    Raises:
        FormatError: The file is truncated, of another format, or has other dims.
    """
    data: np.ndarray
    if path.suffix == ".gz":
        try:
            with gzip.open(path) as file:
                data = np.frombuffer(file.read(_LARGEST), np.uint8)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise FormatError(f"{path} cannot be decompressed: {error}") from error
    else:
        data = FileMap(path).array
    head = 4 + 4 * dims
    magic = bytes([0, 0, _BYTES, dims])
    if data[:4].tobytes() != magic:
        raise FormatError(
            f"{path} begins with {data[:4].tobytes()!r}, and not with {magic!r}, as unsigned bytes of {dims} dims do"
        )
    if len(data) < head:
        raise FormatError(f"{path} is cut short at offset {len(data)}, within its sizes")
    shape = struct.unpack(f">{dims}I", data[4:head].tobytes())
    expected = head + int(np.prod(shape, dtype=object))
    if len(data) != expected:
        what = "is cut short" if len(data) < expected else "goes on"
        raise FormatError(f"{path} {what} at offset {min(len(data), expected)}: {list(shape)} take {expected} bytes")
    return data[head:].reshape(shape)


def _found(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _download(kind: MNISTKind, folder: Path, mirrors: tuple[str, ...]) -> None:
    with written_together(folder) as unfinished:
        for name, md5 in kind.md5.items():
            with downloaded([f"{mirror}{name}.gz" for mirror in mirrors], md5) as path:
                (unfinished / name).write_bytes(gzip.decompress(path.read_bytes()))
