"""Loaders of what other tools yield."""

from libai_data.iterables.collation import default_collate
from libai_data.iterables.from_iterable import from_iterable

__all__ = ["default_collate", "from_iterable"]
