"""Numbers in a few words, for messages and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

_Value = TypeVar("_Value")

_UNITS = ("B", "KB", "MB", "GB", "TB")


def numbers_in_words(numbers: Sequence[int]) -> str:
    """Ascending numbers, as ranges where they follow each other: `0-3 7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def bytes_in_words(count: float) -> str:
    """Bytes with a decimal unit, to three digits."""
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def by_rank(values: dict[int, str]) -> str:
    """Each value of the ranks, once, with who has it: `1.26.4 on rank 0-2, but 1.26.3 on rank 3`.

    Args:
        values: rank -> its value.
    """
    told = ranks_by_value(values).items()
    return ", but ".join(f"{value} on rank {numbers_in_words(ranks)}" for value, ranks in told)


def ranks_by_value(values: Mapping[int, _Value]) -> dict[_Value, list[int]]:
    """The ranks that have each value, ascending; values in the order of their first ranks.

    Args:
        values: rank -> its value.
    """
    found: dict[_Value, list[int]] = {}
    for rank in sorted(values):
        found.setdefault(values[rank], []).append(rank)
    return found
