"""CIFAR-10 and CIFAR-100 in their binary version.

Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009), and
https://www.cs.toronto.edu/~kriz/cifar.html, which describes the files. Each image has one label byte (CIFAR-100: the
coarse label, then the fine label), then 1024 bytes each of red, green and blue, row by row.
"""

from __future__ import annotations

import os
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from libai_data.atomic_files import written_together
from libai_data.data.sources.paths import check_is_file, is_file, text_of
from libai_data.data.sources.published import PublishedImages, downloaded
from libai_data.errors import FormatError

SIDE = 32
_PIXELS = 3 * SIDE * SIDE


@dataclass(frozen=True)
class CIFARKind:
    """The differences between CIFAR-10 and CIFAR-100."""

    classes: int  # number of classes
    labels: int  # bytes of labels before each image; the last one is the class
    folder: str  # of the files
    train: tuple[str, ...]  # files of the training set
    test: tuple[str, ...]  # files of the test set
    names: str  # file with the names of the classes
    url: str  # of the archive
    md5: str  # of the archive, hexadecimal
    pickled: str  # folder of the pickled version, which is not read


CIFAR10 = CIFARKind(
    classes=10,
    labels=1,
    folder="cifar-10-batches-bin",
    train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    test=("test_batch.bin",),
    names="batches.meta.txt",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    md5="c32a1d4ab5d03f1284b67883e8d87530",
    pickled="cifar-10-batches-py",
)
CIFAR100 = CIFARKind(
    classes=100,
    labels=2,
    folder="cifar-100-binary",
    train=("train.bin",),
    test=("test.bin",),
    names="fine_label_names.txt",
    url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    md5="03b5dce01913d631647c71ecec9e9cb8",
    pickled="cifar-100-python",
)


class CIFARSource(PublishedImages):
    """Images of CIFAR, in `cifar-10-batches-bin` or `cifar-100-binary`; `kind` is `CIFAR10` or `CIFAR100`."""

    def _is_there(self) -> bool:
        kind = self.kind
        return all(is_file(self.folder / name) for name in (*kind.train, *kind.test, kind.names))

    def _open(self, root: Path, train: bool) -> list[int]:
        self._paths = [self.folder / name for name in (self.kind.train if train else self.kind.test)]
        self._files = [self._opened(path) for path in self._paths]
        self.classes = self._class_names()
        return list(map(len, self._files))

    def _read(self, file: int, row: int) -> tuple[np.ndarray, int]:
        record, labels = self._files[file][row], self.kind.labels
        return record[labels:].reshape(3, SIDE, SIDE).transpose(1, 2, 0), int(record[labels - 1])

    def _place_of_label(self, file: int, row: int) -> str:
        return f"{self._paths[file]} at offset {row * (self.kind.labels + _PIXELS) + self.kind.labels - 1}"

    def _opened(self, path: Path) -> np.ndarray:
        root = path.parent.parent
        pickled = root / self.kind.pickled
        found = f"; {pickled} is the pickled version, which could run any code when it is read" * os.path.isdir(pickled)
        check_is_file(path, f"{found}; give download=True, or unpack {self.kind.url} in {root}")
        content = self._mapped(path)
        record, size = self.kind.labels + _PIXELS, len(content)
        if size % record or not size:
            raise FormatError(
                f"{path} has {size} bytes, which is not a whole number of images of {record} bytes; it is cut short at "
                f"offset {size - size % record}, or another file"
            )
        return content.reshape(-1, record)

    def _class_names(self) -> tuple[str, ...]:
        path = self.folder / self.kind.names
        names = tuple(text_of(path).split()) if is_file(path) else ()
        if len(names) != self.kind.classes:
            raise FormatError(f"{path} names {len(names)} classes, and not {self.kind.classes}; fetch the files again")
        return names

    def _download(self, url: str | None) -> None:
        kind = self.kind
        with downloaded([url or kind.url], kind.md5) as archive, written_together(self.folder) as unfinished:
            wanted = {f"{kind.folder}/{name}" for name in (*kind.train, *kind.test, kind.names)}
            with tarfile.open(archive, "r:gz") as tar:
                for member in tar:
                    content = tar.extractfile(member) if member.name in wanted else None
                    if content is not None:
                        (unfinished / Path(member.name).name).write_bytes(content.read())
