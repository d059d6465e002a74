"""One round over a dataset, for evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sized

from libai_data.errors import ConfigError
from libai_data.samplers.order import Order
from libai_data.samplers.sampler import IndexBatch, StreamSampler, check_holds_a_batch


class SingleRoundSampler(StreamSampler):
    """Every sample exactly once; all ranks take equally many batches of equal size.

    The last global batch is filled up with repetitions of the round's last sample. `IndexBatch.valid` marks them, so
    that evaluation counts each sample once.

    Args:
        dataset: anything with a length.
        micro_batch_size: samples of a batch for one data-parallel rank.
        shuffle: a seeded permutation instead of the dataset's own order.
        data_parallel_rank: this rank's coordinate on the data axis.
        data_parallel_size: size of the data axis.
        seed: decides the permutation.
        drop_last: leave out a last batch that is not full, instead of filling it up.

    Raises:
        ConfigError: An empty dataset, one smaller than a global batch with `drop_last`, or a size or rank out of range.
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
    ) -> None:
        if getattr(dataset, "is_stream_transform", False):
            raise ConfigError(
                "a stream transform, such as FilteredDataset or PackedDataset, makes an endless stream, of which one "
                "round has no known end. Use CyclicSampler, or OneRound(dataset) in its place"
            )
        super().__init__(
            dataset, micro_batch_size, Order(len(dataset), seed, shuffle), data_parallel_rank, data_parallel_size
        )
        self.drop_last = drop_last
        if drop_last:
            check_holds_a_batch(self.order.size, self.global_batch_size, data_parallel_size)

    def __len__(self) -> int:
        """Number of batches in the round, the same on every rank."""
        full, rest = divmod(self.order.size, self.global_batch_size)
        return full if self.drop_last or rest == 0 else full + 1

    def __iter__(self) -> Iterator[list[int]]:
        """Begin a new round, unless a restored state stands in the middle of one."""
        if self.batch_at(self.position) is None:
            self.position = 0
        return super().__iter__()

    def batches_per_round(self) -> int:
        return len(self)

    def batch_at(self, position: int) -> IndexBatch | None:
        valid = min(self.global_batch_size, self.order.size - position)
        if valid <= 0 or (self.drop_last and valid < self.global_batch_size):
            return None
        size = self.global_batch_size
        return self._part(position, size, valid, position // size)
