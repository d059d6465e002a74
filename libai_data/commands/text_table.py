"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows, a line each, with their cells below each other.

    Args:
        rows: cells, equally many in each row.
    """
    widths = widths_of(rows)
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def widths_of(rows: Sequence[Sequence[str]]) -> list[int]:
    """Characters of each column."""
    return [max(map(len, column)) for column in zip(*rows)]


def with_ruled_head(rows: Sequence[Sequence[str]]) -> list[str]:
    """`aligned`, with a rule of dashes below the first row, column by column."""
    head, *lines = aligned(rows)
    return [head, "  ".join("-" * width for width in widths_of(rows)), *lines]
