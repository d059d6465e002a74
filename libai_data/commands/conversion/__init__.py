"""Conversion of records from one format into shards of another, by several processes."""

from libai_data.commands.conversion.conversion import Conversion, Converted, convert, main

__all__ = ["Conversion", "Converted", "convert", "main"]
