"""Loaders of what other tools yield."""

from libai_data.integrations.collation import default_collate
from libai_data.integrations.from_iterable import from_iterable

__all__ = ["default_collate", "from_iterable"]
