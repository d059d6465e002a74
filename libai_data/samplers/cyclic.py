"""The endless training stream."""

from __future__ import annotations

from math import ceil
from typing import Optional, Sized

from libai_data.samplers.order import Order
from libai_data.samplers.sampler import IndexBatch, StreamSampler, check_at_least, check_holds_a_batch


class CyclicSampler(StreamSampler):
    """Every sample once an epoch, epoch after epoch, without end; batches run on across the border of two epochs.

    Args:
        dataset: anything with a length.
        micro_batch_size: samples of a batch for one data-parallel rank.
        shuffle: another permutation each epoch.
        consumed_samples: samples that all ranks together have taken so far.
        data_parallel_rank: this rank's coordinate on the data axis.
        data_parallel_size: size of the data axis.
        seed: decides the permutations.
        drop_last: leave out the tail of each epoch that fills no global batch (another tail each epoch when shuffled).

    Raises:
        ConfigError: An empty dataset, one smaller than a global batch, or a size or rank out of range.
    """

    endless = True

    def __init__(
        self,
        dataset: Sized,
        micro_batch_size: int,
        shuffle: bool = False,
        consumed_samples: int = 0,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        order = Order(len(dataset), seed, shuffle)
        super().__init__(dataset, micro_batch_size, order, data_parallel_rank, data_parallel_size, consumed_samples)
        check_holds_a_batch(order.size, self.global_batch_size, data_parallel_size)
        if drop_last:
            whole_batches = order.size // self.global_batch_size * self.global_batch_size
            self.order = Order(order.size, seed, shuffle, epoch_size=whole_batches)

    @property
    def consumed_samples(self) -> int:
        """Samples that all ranks together have taken so far."""
        return self.position

    def set_consumed_samples(self, consumed_samples: int) -> None:
        """Go on after this many samples of all ranks together."""
        check_at_least(0, consumed_samples=consumed_samples)
        self.position = int(consumed_samples)

    def set_epoch(self, epoch: int) -> None:
        """Go on at the beginning of this epoch."""
        check_at_least(0, epoch=epoch)
        self.set_consumed_samples(epoch * self.order.epoch_size)

    def __len__(self) -> int:
        """Number of samples in the dataset, as LiBai's."""
        return self.order.size

    def batches_per_round(self) -> int:
        return ceil(self.order.epoch_size / self.global_batch_size)

    def batch_at(self, position: int) -> Optional[IndexBatch]:
        return self._part(position, self.global_batch_size)
