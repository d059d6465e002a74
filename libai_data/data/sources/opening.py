"""The source of any format, by its name or by the names of the files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Callable

from libai_data.data.sources.array_record import ArrayRecordSource
from libai_data.data.sources.arrow import ArrowSource
from libai_data.data.sources.cifar import CIFAR10, CIFAR100, CIFARSource
from libai_data.data.sources.file_formats import format_of_files
from libai_data.data.sources.image_folder import ImageFolderSource
from libai_data.data.sources.image_records import ImageRecords
from libai_data.data.sources.imagenet_tar import ImageNetTarSource
from libai_data.data.sources.json_lines import JsonLinesSource
from libai_data.data.sources.litdata import LitDataSource
from libai_data.data.sources.mds import MDSSource
from libai_data.data.sources.mnist import FASHION_MNIST, MNIST, MNISTSource
from libai_data.data.sources.numpy_files import NumpySource
from libai_data.data.sources.parquet import ParquetSource
from libai_data.data.sources.sharded import Paths
from libai_data.data.sources.storage import listed, patterns_of
from libai_data.data.sources.streamed import StreamedSource, options_for
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
    "litdata": LitDataSource,
    "arrow": ArrowSource,
    "jsonl": JsonLinesSource,
    "numpy": NumpySource,
    "image_folder": partial(_images, ImageFolderSource),
    **{name: partial(_images, source) for name, source in _OF_IMAGES.items()},
    **{f"{name}_test": partial(_images, partial(source, train=False)) for name, source in _OF_IMAGES.items()},
}
"""Formats by name; those of images take the folder that their source takes, and "_test" the images to test with."""

# What datasets writes beside its Arrow files, and Streaming and LitData beside their shards.
_NOTES = (".json",)


def open_source(paths: Paths, format: str = "", streaming: bool = False, columns: Sequence[str] | None = None) -> Any:
    """Open files with the source for their format.

    Args:
        paths: files, globs or folders; see `storage.listed`. To stream: the address of one folder of shards, or a glob.
        format: one of `SOURCES`; by default from the endings of the file names.
        streaming: copy each shard to this machine when it is needed, and remove copies that are not; see
            `StreamedSource`.
        columns: names of the columns to read, of Parquet, Arrow, MDS and LitData; by default all.

    Raises:
        ConfigError: There is no such file, format or column, or the file names give no format, or several. Or the
            shards cannot be streamed.
        FormatError: A file cannot be read.
        SchemaError: The columns that are read differ between the files.
    """
    if not streaming:
        kind = source_format(paths, format)
        return SOURCES[kind](paths, **options_for(kind, columns))
    folders = patterns_of(paths)
    if len(folders) != 1:
        raise ConfigError(f"streaming reads one folder of shards, not {folders}; give its address, or one glob")
    return StreamedSource(folders[0], SOURCES, _checked(format), columns)


def source_format(paths: Paths, format: str = "") -> str:
    """The name of the format of some files; see `open_source`."""
    if _checked(format):
        return format
    files = listed(paths)
    samples = [path for path in files if not path.endswith(_NOTES)]
    return format_of_files(paths, samples or files, SOURCES)


def _checked(format: str) -> str:
    if format and (not isinstance(format, str) or format not in SOURCES):
        raise ConfigError(f"there is no format {format!r}; there are {list(SOURCES)}.{nearest(format, SOURCES)}")
    return format
