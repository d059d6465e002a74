"""Loaders of datasets and iterables of any kind."""

from libai_data.iterables.data_loader import DataLoader
from libai_data.iterables.from_iterable import from_iterable
from libai_data.iterables.packed_stream import FilteredStream, MappedStream, PackedStream
from libai_data.loader.default_collate import default_collate

__all__ = ["DataLoader", "FilteredStream", "MappedStream", "PackedStream", "default_collate", "from_iterable"]
