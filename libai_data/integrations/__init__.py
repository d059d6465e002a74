"""This package inside other frameworks; `from_iterable` is here for those who look for it."""

from libai_data.iterables import default_collate, from_iterable

__all__ = ["default_collate", "from_iterable"]
