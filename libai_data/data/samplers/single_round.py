"""Finite passes over a dataset: each pass is an epoch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sized
from typing import Any

from libai_data.data.attributes import attribute_of
from libai_data.data.datasets.blend import blend_of
from libai_data.data.datasets.combine import length_of
from libai_data.data.samplers.batch_runs import Run, rounded_up, runs_of
from libai_data.data.samplers.cursor import Cursor, IndexBatch
from libai_data.data.samplers.lane_order import laned_order
from libai_data.data.samplers.order import Order, check_holds_a_batch
from libai_data.data.samplers.sampler import StreamSampler
from libai_data.data.samplers.weighted_order import drawn_order
from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import FLAG, check
from libai_data.structures import BatchInfo

logger = logging.getLogger(__name__)


class SingleRoundSampler(StreamSampler):
    """A finite stream: each pass has every sample once, and all ranks get the same number of batches of the same size.

    Each pass is the next epoch. Positions are counted over all epochs: epoch `e` of `n` samples has the positions `en`
    to `(e + 1)n - 1`. After a state was restored, the next pass is the rest of the epoch in which the state was saved.

    The last global batch is filled up with copies of the last sample. `IndexBatch.valid` is the number of rows that
    count, so an evaluation counts each sample once.

    The arguments are those of `CyclicSampler`, without `consumed_samples`. With `drop_last`, the sampler drops the last
    batch if it is not full.

    Raises:
        ConfigError: An empty dataset, one smaller than a global batch with `drop_last`, malformed weights, a stream
            transform, or a size or rank out of range.
    """

    endless = False

    def __init__(
        self,
        dataset: Sized,
        micro_batch_size: int,
        shuffle: bool = False,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        seed: int = 0,
        drop_last: bool = False,
        weights: Any = None,
        num_samples: int | None = None,
        replacement: bool = True,
        lanes: int | None = None,
        block: int | None = None,
    ) -> None:
        check({"shuffle": FLAG, "drop_last": FLAG}, shuffle=shuffle, drop_last=drop_last)
        if attribute_of(dataset, "is_stream_transform", False):
            raise ConfigError(
                "how many outputs a stream transform has, such as FilteredDataset or PackedDataset, is not known in "
                "advance. Use DataLoader(dataset, batch_size), CyclicSampler, or OneRound(dataset) in its place"
            )
        if shuffle and blend_of(dataset) is not None:
            logger.warning(
                "A pass over a %s uses each sample once, whatever the weights of the blend. To draw by weight, use "
                "CyclicSampler, or DataLoader with ends='cycle'.",
                type(dataset).__name__,
            )
        order = (
            laned_order(dataset, seed, shuffle, lanes, block, weights)
            or drawn_order(dataset, seed, weights, num_samples, replacement)
            or Order(length_of(dataset), seed, shuffle)
        )
        super().__init__(dataset, micro_batch_size, order, data_parallel_rank, data_parallel_size)
        self.drop_last = drop_last
        if drop_last:
            check_holds_a_batch(self.order.epoch_size, self.global_batch_size, data_parallel_size)

    def __len__(self) -> int:
        """Number of batches in the round, the same on every rank."""
        full, rest = divmod(self.order.epoch_size, self.global_batch_size)
        return full if self.drop_last or rest == 0 else full + 1

    def batches_per_round(self) -> int:
        return len(self)

    def next_pass(self) -> Cursor:
        position, _, continues, _ = self.cursor
        if not continues or self.batch_at(position) is None:
            position = self._end_of_epoch(position)
        return Cursor(position, continues=False)

    def after(self, batch: IndexBatch | BatchInfo) -> Cursor:
        position = batch.position + batch.valid
        return Cursor(position, continues=position % self.order.epoch_size == 0)

    def after_pass(self) -> Cursor:
        position, _, continues, _ = self.cursor
        return Cursor(position if continues else self._end_of_epoch(position))

    def _end_of_epoch(self, position: int) -> int:
        return (position // self.order.epoch_size + 1) * self.order.epoch_size

    def batches(self, position: int) -> Iterator[IndexBatch]:
        end = self._end_of_epoch(position)
        while position < end:
            batch = self.batch_at(position)
            if batch is None:
                return
            yield batch
            position += batch.size

    def batch_at(self, position: int) -> IndexBatch | None:
        size = self.global_batch_size
        valid = min(size, self._end_of_epoch(position) - position)
        if self.drop_last and valid < size:
            return None
        epoch, offset = divmod(position, self.order.epoch_size)
        number = epoch * len(self) + offset // size
        return self._part(position, self._rows_for(valid), valid, number, self._end_of_epoch(position))

    def _rows_for(self, valid: int) -> int:
        """Rows of a global batch that has `valid` rows that count."""
        return self.global_batch_size


class ShortEndSampler(SingleRoundSampler):
    """A `SingleRoundSampler` whose last batch is short: it has only the samples that are left.

    All data-parallel ranks get equally many rows, so at most `data_parallel_size - 1` rows repeat the last sample.

    Attributes:
        together: rows that a batch transform needs together; each rank gets a multiple of this number of rows.
    """

    together = 1

    def batch_runs(self) -> list[Run]:
        ranks = self.data_parallel_size
        return runs_of(self.order.epoch_size, self.global_batch_size, lambda valid: self._rows_for(valid) // ranks)

    def _rows_for(self, valid: int) -> int:
        return rounded_up(valid, self.data_parallel_size * self.together)
