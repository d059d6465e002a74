"""Where a stream stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from libai_data.data.datasets.stream_transform import Start
from libai_data.errors.argument_rules import EPOCH, check
from libai_data.structures import BatchInfo

if TYPE_CHECKING:
    from libai_data.data.samplers.sampler import IndexBatch


class Cursor(NamedTuple):
    """Where a stream stands; replaced as a whole, so that an interrupt leaves the old one or the new one.

    Args:
        position: behind the last row that was taken.
        epoch: of a stream whose positions begin anew each epoch; 0 for all others.
        continues: the next pass begins here. If False, a pass has begun, and the next one begins with the next epoch.
        start: `next_start` of the batch before the position, if it was taken.
    """

    position: int = 0
    epoch: int = 0
    continues: bool = True
    start: Start | None = None


class EpochPositions:
    """For finite streams of unknown length: positions begin anew each epoch, and the cursor knows the epoch."""

    cursor: Cursor

    def next_pass(self) -> Cursor:
        """The cursor where the next pass begins: with the next epoch, unless a state or an epoch was set."""
        position, epoch, continues, _ = self.cursor
        return Cursor(position, epoch, False) if continues else Cursor(0, epoch + 1, False)

    def after(self, batch: IndexBatch | BatchInfo) -> Cursor:
        """The cursor once this batch has been taken."""
        assert batch.epoch is not None
        return Cursor(batch.position + batch.valid, batch.epoch, False)

    def after_pass(self) -> Cursor:
        """The cursor once a pass has ended."""
        return Cursor(0, self.cursor.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be this epoch."""
        check({"epoch": EPOCH}, epoch=epoch)
        self.cursor = Cursor(0, int(epoch))
