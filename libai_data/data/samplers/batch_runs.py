"""Runs of equally large batches, as far as they are known before an epoch begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, Callable, NamedTuple


class Run(NamedTuple):
    """Batches of an epoch that follow each other.

    Args:
        batches: their number.
        rows: rows of each batch on each data-parallel rank.
    """

    batches: int
    rows: int


def rounded_up(rows: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `rows`."""
    return -(-rows // multiple) * multiple


def runs_of(samples: int, size: int, rows_for: Callable[[int], int]) -> list[Run]:
    """The runs if `samples` are cut into global batches of `size`, and the last one is short.

    Args:
        rows_for: returns the rows on each data-parallel rank of a number of samples.
    """
    full, left = divmod(samples, size)
    return [Run(count, rows_for(each)) for count, each in ((full, size), (1, left)) if count and each]


def runs_of_lists(lists: Any) -> list[Run]:
    """The runs of a list of lists, or of a BatchSampler of torch or OneFlow; empty for any other sampler."""
    if isinstance(lists, (list, tuple)) and all(hasattr(each, "__len__") for each in lists):
        return [Run(len([*run]), rows) for rows, run in groupby(map(len, lists))]
    # A subclass with an `__iter__` of its own may yield lists of any length.
    module = str(getattr(getattr(type(lists), "__iter__", None), "__module__", ""))
    return runs_of_sampler(lists) if module.startswith(("torch.utils.data", "oneflow.utils.data")) else []


def runs_of_sampler(thing: Any, rows_for: Callable[[int], int] = int) -> list[Run]:
    """`runs_of` for what cuts the indices of its `sampler`, such as torch's DataLoader; empty if its length is unknown,
    or if it has `drop_last`."""
    try:
        return [] if thing.drop_last else runs_of(len(thing.sampler), int(thing.batch_size), rows_for)
    except Exception:  # The length of a torch sampler may raise.
        return []


def named_runs(runs: Iterable[Run]) -> Iterator[tuple[int, str, int]]:
    """Number and name of the first batch of each run, and its rows."""
    runs, first = [*runs], 0
    for batches, rows in runs:
        is_last = first > 0 and first + 1 == sum(run.batches for run in runs)
        yield first, "the last batch" if is_last else f"batch {first}", rows
        first += batches
