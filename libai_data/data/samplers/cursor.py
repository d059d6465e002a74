"""A batch of a stream as indices, and the cursor of a stream: its current position."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from libai_data.data.datasets.stream_transform import Start
from libai_data.errors.argument_rules import EPOCH, check
from libai_data.structures import BatchInfo


class IndexBatch(NamedTuple):
    """One reader's part of a global batch; the fields of `BatchInfo`, and this reader's samples.

    Args:
        epochs: int64 [n], the epoch of each of this reader's samples.
        indices: int64 [n], the dataset index of each of this reader's samples.
    """

    step: int
    epoch: int | None
    position: int
    size: int
    valid: int
    epochs: np.ndarray
    indices: np.ndarray
    next_start: Start | None = None


new_index_batch = partial(tuple.__new__, IndexBatch)
"""Makes an IndexBatch in half the time of the constructor, which is written in Python."""


class Cursor(NamedTuple):
    """The current position of a stream; replaced as a whole, so an interrupt leaves either the old or the new one."""

    position: int = 0  # after the last row that was used
    epoch: int = 0  # if the positions of the stream begin at 0 in each epoch; otherwise 0
    continues: bool = True  # whether the next pass begins here; else a pass has begun, and the next epoch follows
    start: Start | None = None  # `next_start` of the batch before the position, if this process used that batch


class EpochPositions:
    """For finite streams of unknown length: positions begin at 0 in each epoch, and the cursor has the epoch."""

    cursor: Cursor

    def next_pass(self) -> Cursor:
        """The cursor where the next pass begins: at the next epoch, unless a state or an epoch was set."""
        position, epoch, continues, _ = self.cursor
        return Cursor(position, epoch, False) if continues else Cursor(0, epoch + 1, False)

    def after(self, batch: IndexBatch | BatchInfo) -> Cursor:
        """The cursor after this batch was used."""
        assert batch.epoch is not None
        return Cursor(batch.position + batch.valid, batch.epoch, False)

    def after_pass(self) -> Cursor:
        """The cursor after a pass ended."""
        return Cursor(0, self.cursor.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Begin the next pass with this epoch."""
        check({"epoch": EPOCH}, epoch=epoch)
        self.cursor = Cursor(0, int(epoch))
