"""Image data sets that are published with checksums; fetched on request."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from libai_data.data.files.identity import file_identity
from libai_data.data.sources.mapped_file import MappedFile
from libai_data.data.sources.paths import checked_path
from libai_data.data.sources.remote import md5_of
from libai_data.data.sources.sharded import checked_indices, runs_of
from libai_data.data.sources.storage import LocalFile
from libai_data.errors import DataPipelineError, FormatError, StorageError
from libai_data.errors.argument_rules import OUTPUT, check, check_types

logger = logging.getLogger(__name__)


class PublishedImages:
    """Images of a published data set, and their labels; files that are not compressed are memory-mapped.

    The arguments are those of the datasets (`image_datasets.PublishedImages`), and `kind`, which names the data set.

    Attributes:
        classes: names of the classes.
    """

    classes: tuple[str, ...]
    _paths: list[Path]
    """The files; those of images come first."""
    _mapped_files: list[MappedFile]

    def __init__(
        self,
        root: str | Path,
        kind: Any,
        train: bool = True,
        download: bool = False,
        source_url: str | None = None,
    ) -> None:
        check_types(PublishedImages, {"train": train, "download": download, "source_url": source_url})
        self.kind = kind
        if download:
            check({"root": OUTPUT}, root=root)
        root = checked_path("root", root)
        self.folder = root / kind.folder
        if download and not self._is_there():
            self._download(source_url)
        self._mapped_files = []
        self._ends = np.cumsum(self._open(root, train))

    def _is_there(self) -> bool:
        """Whether all files are in the folder."""
        raise NotImplementedError

    def _download(self, url: str | None) -> None:
        """Download all files into the folder."""
        raise NotImplementedError

    def _open(self, root: Path, train: bool) -> list[int]:
        """Open the files, and set `_paths` and `classes`; returns the number of images of each file."""
        raise NotImplementedError

    def _read(self, file: int, row: int) -> tuple[np.ndarray, int]:
        """An image of a file, uint8 [H, W] or [H, W, 3], and its label."""
        raise NotImplementedError

    def _place_of_label(self, file: int, row: int) -> str:
        """Where the label of an image is, for messages: the file and the offset."""
        raise NotImplementedError

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, index: int) -> tuple[np.ndarray, int]:
        """An image, uint8 [H, W] or [H, W, 3], and its label; a FormatError if this is no class, or a file has
        changed."""
        for mapped in self._mapped_files:
            mapped.check_not_written()
        file, row = self._place(index)
        image, label = self._read(file, row)
        if label >= len(self.classes):
            raise FormatError(
                f"{self._place_of_label(file, row)}: label {label} of {self.name(index)}; there are "
                f"{len(self.classes)} classes"
            )
        return np.array(image, order="C"), label

    def name(self, index: int) -> str:
        """Where an image is, for messages: its file, and its number in the file."""
        file, row = self._place(index)
        return f"image {row} of {self._paths[file]}"

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint stores to identify the data: the names of the files, and their numbers of images."""
        counts = np.diff(self._ends, prepend=0).tolist()
        return {path.name.replace(".gz", ""): count for path, count in zip(self._paths, counts)}

    def _mapped(self, path: Path) -> np.ndarray:
        """The bytes of a file, uint8 [size], as a memory map."""
        self._mapped_files.append(MappedFile(path))
        return self._mapped_files[-1].array

    def _place(self, index: int) -> tuple[int, int]:
        """The file of an image, and its number in the file."""
        [(file, _, rows)] = runs_of(self._ends, checked_indices([operator.index(index)], len(self), "images"))
        return file, int(rows[0])

    @property
    def identity(self) -> list[Any]:
        """The identity of the files as they are now; see `libai_data.data.files.identity`."""
        return [file_identity(path) for path in self._paths]


@contextmanager
def downloaded(urls: Sequence[str], md5: str) -> Iterator[Path]:
    """A verified copy of a published file in the cache of this node; one process fetches it, others wait.

    Yields the path of the copy, which is in use until the block ends. If an address cannot be fetched, or the file has
    another MD5 digest (hexadecimal), the next address is tried; a StorageError if none is right.
    """
    failures = []
    for url in urls:
        logger.info("Downloading %s.", url)
        try:
            file = LocalFile(url)
        except DataPipelineError as error:
            failures.append(str(error))
            continue
        with file:
            found = md5_of(file.path)
            if found == md5:
                yield file.path
                return
        failures.append(f"{url} has the md5 sum {found}, and not {md5}")
    raise StorageError(f"the file cannot be downloaded: {'; '.join(failures)}")
