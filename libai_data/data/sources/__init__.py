"""Sources: records on disk, one module for each format."""

from libai_data.data.sources.array_record import ArrayRecordSource
from libai_data.data.sources.arrow import ArrowSource
from libai_data.data.sources.cifar import CIFAR10, CIFAR100, CIFARSource
from libai_data.data.sources.image_folder import ImageFolderSource
from libai_data.data.sources.image_records import ImageRecords
from libai_data.data.sources.imagenet_tar import ImageNetTarSource
from libai_data.data.sources.indexed import IndexedSource
from libai_data.data.sources.indexed_writer import IndexedWriter, dtype_for, merge_indexed
from libai_data.data.sources.json_lines import JsonLinesSource
from libai_data.data.sources.litdata import LitDataSource
from libai_data.data.sources.mds import MDSSource
from libai_data.data.sources.memory import InMemorySource
from libai_data.data.sources.mnist import FASHION_MNIST, MNIST, MNISTSource
from libai_data.data.sources.numpy_files import NumpySource
from libai_data.data.sources.opening import open_source
from libai_data.data.sources.packed_record import pack_record, unpack_record
from libai_data.data.sources.parquet import ParquetSource
from libai_data.data.sources.storage import LocalFile, Storage, listed, local_path
from libai_data.data.sources.webdataset import WebDatasetSource

__all__ = [
    "ArrayRecordSource",
    "ArrowSource",
    "CIFAR10",
    "CIFAR100",
    "CIFARSource",
    "FASHION_MNIST",
    "ImageFolderSource",
    "ImageNetTarSource",
    "ImageRecords",
    "InMemorySource",
    "IndexedSource",
    "IndexedWriter",
    "JsonLinesSource",
    "LitDataSource",
    "LocalFile",
    "MDSSource",
    "MNIST",
    "MNISTSource",
    "NumpySource",
    "ParquetSource",
    "Storage",
    "WebDatasetSource",
    "dtype_for",
    "listed",
    "local_path",
    "merge_indexed",
    "open_source",
    "pack_record",
    "unpack_record",
]
