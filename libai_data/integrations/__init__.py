"""This package inside other frameworks; `from_iterable` can also be imported from here."""

from libai_data.iterables import default_collate, from_iterable

__all__ = ["default_collate", "from_iterable"]
