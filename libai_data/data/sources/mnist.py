"""MNIST, Fashion-MNIST and other data in the same file format, IDX.

Source: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits", whose page describes the format: two
zero bytes, one byte for the type of the numbers (8 for unsigned bytes), one for the number of dims, the size of each
dim as a big-endian integer of 4 bytes, then the numbers. H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST" (2017).
"""

from __future__ import annotations

import gzip
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import numpy as np

from libai_data.atomic_files import written_together
from libai_data.data.files.file_map import FileMap
from libai_data.data.sources.paths import check_is_file, is_file
from libai_data.data.sources.published import PublishedImages, downloaded
from libai_data.errors import FormatError

_BYTES = 8
_LABELS_BEGIN = 8
# No IDX file of such data is larger, but a damaged gzip file could decompress to more bytes.
_LARGEST = 1 << 32


@dataclass(frozen=True)
class MNISTKind:
    """One of the data sets."""

    folder: str  # of the files, within the root folder
    mirrors: tuple[str, ...]  # addresses of the folders that publish the files
    md5: dict[str, str]  # name of a file without ".gz" -> MD5 digest of the compressed file, hexadecimal
    classes: tuple[str, ...]  # names of the classes


MNIST = MNISTKind(
    folder="MNIST/raw",
    mirrors=("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
    md5={
        "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
    },
    classes=tuple("0123456789"),
)
FASHION_MNIST = MNISTKind(
    folder="FashionMNIST/raw",
    mirrors=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    md5={
        "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
    },
    classes=(
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
)


class MNISTSource(PublishedImages):
    """Images of MNIST or a data set in the same format; `kind` is `MNIST` or `FASHION_MNIST`.

    `root` contains `MNIST/raw` or `FashionMNIST/raw`, or the files themselves. `source_url` is the address of a folder,
    and ends with "/".
    """

    def _is_there(self) -> bool:
        return all(_found(self.folder, name) for name in self.kind.md5)

    def _download(self, url: str | None) -> None:
        with written_together(self.folder) as unfinished:
            for name, md5 in self.kind.md5.items():
                mirrors = (url,) if url else self.kind.mirrors
                with downloaded([f"{mirror}{name}.gz" for mirror in mirrors], md5) as path:
                    (unfinished / name).write_bytes(gzip.decompress(path.read_bytes()))

    def _open(self, root: Path, train: bool) -> list[int]:
        self.classes = self.kind.classes
        names = sorted(name for name in self.kind.md5 if name.startswith("train-") == train)  # images, then labels
        self._paths = [_found(self.folder, name) or _found(root, name) or self.folder / name for name in names]
        for path in self._paths:
            check_is_file(path, f", nor {path.name}.gz; give download=True, or put the file there")
        self._images, self._labels = (read_idx(path, dims, self._mapped) for path, dims in zip(self._paths, (3, 1)))
        if len(self._images) != len(self._labels):
            raise FormatError(
                f"{self._paths[0]} has {len(self._images)} images, and {self._paths[1]} {len(self._labels)} labels"
            )
        return [len(self._images)]

    def _read(self, file: int, row: int) -> tuple[np.ndarray, int]:
        return self._images[row], int(self._labels[row])

    def _place_of_label(self, file: int, row: int) -> str:
        return f"{self._paths[1]} at offset {_LABELS_BEGIN + row}"


def _map(path: Path) -> np.ndarray:
    return FileMap(path).array


def read_idx(path: Path, dims: int, map_file: Callable[[Path], np.ndarray] = _map) -> np.ndarray:
    """Read an IDX file of unsigned bytes with `dims` dims, gzipped or not; `map_file` returns the bytes of a file.

    Returns:
        uint8 with the shape that the file states, read-only.
    """
    data: np.ndarray
    if path.suffix == ".gz":
        try:
            with gzip.open(path) as file:
                data = np.frombuffer(file.read(_LARGEST), np.uint8)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise FormatError(f"{path} cannot be decompressed: {error}") from error
    else:
        data = map_file(path)
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
    return next((path for path in (folder / name, folder / f"{name}.gz") if is_file(path)), None)
