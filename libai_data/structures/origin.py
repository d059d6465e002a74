"""What a loader knows of a batch: its place in the stream, its samples, and what the ranks have compared."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np


class BatchInfo(NamedTuple):
    """The position of a batch in the stream; equal on all ranks.

    Args:
        step: number of this batch since the stream's beginning.
        epoch: epoch of the global batch's first sample; None in lanes of an endless filter or packer without `lengths`,
            where no rank knows in which epochs the lanes of other ranks are.
        position: position of the global batch's first sample; samples that are left out on purpose have no position.
        size: samples that the loader read for the global batch. They are its rows, unless a collate_fn leaves some out
            or joins some.
        valid: rows [0, valid) of the global batch count; the rest is padding (evaluation only).
        next_start: for a stream transform, where the output after this batch begins. With lanes, one number for each
            lane, or -1 if other ranks read the lane.
    """

    step: int
    epoch: int | None
    position: int
    size: int
    valid: int
    next_start: int | tuple[int, ...] | None = None


class RowIndices(NamedTuple):
    """Which samples this rank read for its rows of a batch: epochs and indices, int64 [rows] each."""

    epochs: np.ndarray
    indices: np.ndarray


@dataclass
class Agreement:
    """The results of comparisons between ranks; shared by all batches of a loader."""

    # Shapes may change from batch to batch, as with a padding collator or a user's own sampler. Then fields and
    # positions are compared for each batch instead of once.
    per_batch: bool = False
    check_every: int = 0  # contents are compared after this many batches; 0 never compares them
    order: str = ""  # what decides the order of the samples, such as the seed, in words
    data_parallel_size: int | None = None  # of the mesh that the loader was built for; None if it is not known
    repeats: bool = False  # one list of indices for all ranks decides the samples, so two may read the same sample
    fields_agree: bool = False  # all ranks have the same fields
    # The number of batches that were made global. It is counted here, because all ranks must compare at the same time
    # even if one of them is at another position.
    batches: int = 0
    # Epoch, index and checksum of a sample that every rank has read, to see whether all have equal data.
    common_sample: tuple[int, int, int] | None = None
    # The number of the collective in which the ranks made the loader, or first used it. It is equal on all ranks, so
    # it shows whether they use the same one of several loaders. 0 before.
    first_use: int = 0


class Origin(NamedTuple):
    """Information that a loader attaches to a batch, for `to_global`, accumulation and evaluation."""

    info: BatchInfo | None = None  # the position of the batch in the stream
    rows: RowIndices | None = None  # which samples the rows are, if this rank read them
    agreement: Agreement | None = None  # shared by all batches of the loader
    parts: frozenset[str] = frozenset()  # fields whose tensors have only this tensor-parallel rank's part
    absent: frozenset[str] = frozenset()  # fields whose bytes this rank did not get, as its stage does not need them
    skipped: int = 0  # digest of the samples that failed so far, and of their substitutes, if this rank read them


# For each batch of a loader: the constructors of these classes are written in Python, and take twice as long.
new_info = partial(tuple.__new__, BatchInfo)
new_rows = partial(tuple.__new__, RowIndices)
new_origin = partial(tuple.__new__, Origin)
