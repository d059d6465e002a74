"""The source of any format, by its name or by the names of the files."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, Callable

from libai_data.data.sources.array_record import ArrayRecordSource
from libai_data.data.sources.arrow import ArrowSource
from libai_data.data.sources.cifar import CIFAR10, CIFAR100, CIFARSource
from libai_data.data.sources.image_folder import ImageFolderSource
from libai_data.data.sources.image_records import ImageRecords
from libai_data.data.sources.imagenet_tar import ImageNetTarSource
from libai_data.data.sources.json_lines import JsonLinesSource
from libai_data.data.sources.mds import MDSSource
from libai_data.data.sources.mnist import FASHION_MNIST, MNIST, MNISTSource
from libai_data.data.sources.numpy_files import NumpySource
from libai_data.data.sources.parquet import ParquetSource
from libai_data.data.sources.sharded import Paths
from libai_data.data.sources.storage import listed, patterns_of
from libai_data.data.sources.webdataset import WebDatasetSource
from libai_data.errors import ConfigError, nearest


def _images(source: Callable[..., Any], folders: Paths) -> ImageRecords:
    """Images of one folder as records."""
    names = patterns_of(folders)
    if len(names) != 1:
        raise ConfigError(f"images are read from one folder at a time, not from {names}")
    return ImageRecords(source(names[0]))


_OF_IMAGES: dict[str, Callable[..., Any]] = {
    "cifar10": partial(CIFARSource, kind=CIFAR10),
    "cifar100": partial(CIFARSource, kind=CIFAR100),
    "mnist": partial(MNISTSource, kind=MNIST),
    "fashion_mnist": partial(MNISTSource, kind=FASHION_MNIST),
    "imagenet_tar": ImageNetTarSource,
}
SOURCES: dict[str, Callable[..., Any]] = {
    "array_record": ArrayRecordSource,
    "webdataset": WebDatasetSource,
    "parquet": ParquetSource,
    "mds": MDSSource,
    "arrow": ArrowSource,
    "jsonl": JsonLinesSource,
    "numpy": NumpySource,
    "image_folder": partial(_images, ImageFolderSource),
    **{name: partial(_images, source) for name, source in _OF_IMAGES.items()},
    **{f"{name}_test": partial(_images, partial(source, train=False)) for name, source in _OF_IMAGES.items()},
}
"""Formats by name; those of images take the folder that their source takes, and "_test" the images to test with."""

_OF_ENDING = {
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
    ".tar": "webdataset",
    ".parquet": "parquet",
    ".mds": "mds",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".npy": "numpy",
    ".npz": "numpy",
}
# What datasets writes beside its Arrow files, and Streaming beside MDS shards.
_NOTES = (".json",)


def open_source(paths: Paths, format: str = "") -> Any:
    """The source of some files.

    Args:
        paths: files, globs or folders; see `storage.listed`.
        format: one of `SOURCES`; by default from the endings of the file names.

    Raises:
        ConfigError: There is no such file or format, or the file names give no format, or several.
        FormatError: A file cannot be read.
    """
    return SOURCES[source_format(paths, format)](paths)


def source_format(paths: Paths, format: str = "") -> str:
    """The name of the format of some files; see `open_source`."""
    if format:
        if not isinstance(format, str) or format not in SOURCES:
            raise ConfigError(f"there is no format {format!r}; there are {list(SOURCES)}.{nearest(format, SOURCES)}")
        return format
    files = [path for path in listed(paths) if not path.endswith(_NOTES)]
    found = sorted({_format_of(path) for path in files})
    if len(found) != 1 or not found[0]:
        endings = sorted({Path(path).suffix for path in files})
        raise ConfigError(
            f"the files of {paths} end with {endings}, which belong to no single format; name it: {list(SOURCES)}"
        )
    return found[0]


def _format_of(path: str) -> str:
    # Shards of ArrayRecord are often called "x.array_record-00001-of-00008", compressed ones of MDS "x.mds.zstd".
    _, ending = os.path.splitext(path.removesuffix(".zstd") if path.endswith(".mds.zstd") else path)
    return _OF_ENDING.get(ending, "") or _OF_ENDING.get(ending.partition("-")[0], "")
