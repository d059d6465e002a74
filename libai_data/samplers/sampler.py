"""What all samplers share: a place in the stream, and this rank's part of each global batch."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Sized, Tuple

import numpy as np

from libai_data.errors import CheckpointError, ConfigError
from libai_data.samplers.order import ORDER_VERSION, Order

_WINDOW = 4096
"""Samples whose indices a sampler computes at once, at most; never more than reach into the next epoch."""


@dataclass(frozen=True)
class IndexBatch:
    """One reader's part of a global batch.

    Args:
        step: number of the global batch since the stream's beginning.
        epoch: epoch of the global batch's first sample.
        position: position of the global batch's first sample.
        size: rows of the global batch.
        valid: rows [0, valid) of the global batch count; the rest is padding.
        epochs: int64 [n], the epoch of each of this reader's samples.
        indices: int64 [n], the dataset's index of each.
    """

    step: int
    epoch: int
    position: int
    size: int
    valid: int
    epochs: np.ndarray
    indices: np.ndarray


class StreamSampler:
    """Base of the samplers: global batch k of size B is positions [kB, (k+1)B) of the order, and data-parallel rank d
    takes its d-th contiguous part.

    Iterating yields one list of indices a batch, as `batch_sampler` of other libraries does; the loader asks for
    `batch_at(position)`, which any process can answer for any position in O(1).
    """

    endless: bool

    def __init__(
        self,
        dataset: Sized,
        micro_batch_size: int,
        order: Order,
        data_parallel_rank: int,
        data_parallel_size: int,
        position: int = 0,
    ) -> None:
        check_at_least(1, micro_batch_size=micro_batch_size, data_parallel_size=data_parallel_size)
        check_at_least(0, data_parallel_rank=data_parallel_rank, consumed_samples=position)
        if data_parallel_rank >= data_parallel_size:
            raise ConfigError(
                f"data_parallel_rank is {data_parallel_rank}; with data_parallel_size {data_parallel_size} it can be "
                f"0 to {data_parallel_size - 1}"
            )
        self.dataset = dataset
        self.order = order
        self.micro_batch_size = int(micro_batch_size)
        self.data_parallel_rank = int(data_parallel_rank)
        self.data_parallel_size = int(data_parallel_size)
        self.position = int(position)
        self._serve((self.data_parallel_rank,))

    def _serve(self, shards: Tuple[int, ...]) -> None:
        shard = np.arange(self.micro_batch_size, dtype=np.int64)
        self._rows = np.concatenate([first * self.micro_batch_size + shard for first in shards])
        self._window_start = 0
        self._window = (np.empty((0, 0), dtype=np.int64), np.empty((0, 0), dtype=np.int64))

    def serving(self, shards: Tuple[int, ...]) -> StreamSampler:
        """This sampler for a reader that serves several data-parallel ranks.

        Args:
            shards: their coordinates on the data axis, ascending; each batch holds their parts one behind the other.
        """
        other = copy(self)
        other._serve(shards)
        return other

    def batches_per_round(self) -> int:
        """Batches of one round, or of one epoch of an endless stream (rounded up)."""
        raise NotImplementedError

    @property
    def global_batch_size(self) -> int:
        """Samples of one batch over all data-parallel ranks."""
        return self.micro_batch_size * self.data_parallel_size

    def batch_at(self, position: int) -> Optional[IndexBatch]:
        """This rank's part of the global batch that begins at `position`, or None past the end of the round."""
        raise NotImplementedError

    def batches(self, position: int) -> Iterator[IndexBatch]:
        """This rank's parts of all batches from `position` to the end of the round."""
        batch = self.batch_at(position)
        while batch is not None:
            yield batch
            batch = self.batch_at(batch.position + batch.size)

    def _part(self, position: int, valid: int) -> IndexBatch:
        """Cut out this rank's rows; rows past `valid` repeat the last valid sample."""
        size = self.global_batch_size
        if valid < size:
            epochs, indices = self.order.locate(position + np.minimum(self._rows, valid - 1))
        else:
            epochs, indices = self._full_part(position, size)
        epoch = position // self.order.epoch_size
        return IndexBatch(position // size, epoch, position, size, valid, epochs, indices)

    def _full_part(self, position: int, size: int) -> Tuple[np.ndarray, np.ndarray]:
        """Locate this rank's rows for many batches at once: a numpy call costs as much for 4,000 samples as for 40."""
        number, misfit = divmod(position - self._window_start, size)
        if misfit or not 0 <= number < len(self._window[0]):
            batches = min(_WINDOW // len(self._rows), self.order.epoch_size // size)
            batches = max(1, batches)
            starts = position + size * np.arange(batches, dtype=np.int64)
            epochs, indices = self.order.locate((starts[:, None] + self._rows).ravel())
            self._window = epochs.reshape(batches, -1), indices.reshape(batches, -1)
            self._window_start, number = position, 0
        epochs, indices = self._window
        return epochs[number], indices[number]

    def __iter__(self) -> Iterator[List[int]]:
        for batch in self.batches(self.position):
            self.position = batch.position + batch.size
            yield batch.indices.tolist()

    def state_dict(self) -> Dict[str, Any]:
        """The place in the stream and all that decides what comes next, as JSON."""
        return {
            "position": self.position,
            "seed": self.order.seed,
            "shuffle": self.order.shuffle,
            "samples": self.order.size,
            "epoch_size": self.order.epoch_size,
            "order_version": ORDER_VERSION,
        }

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Go on where another sampler stopped, in O(1), whatever its batch size and number of ranks were.

        Raises:
            CheckpointError: The state belongs to another stream; both values are shown.
        """
        own = self.state_dict()
        missing = sorted(set(own) - set(state))
        if missing:
            raise CheckpointError(f"the data state lacks {missing}; it was not saved by this sampler: {state}")
        different = {key: (state[key], own[key]) for key in own if key != "position" and state[key] != own[key]}
        if different:
            shown = ", ".join(f"{key} was {was} and is now {now}" for key, (was, now) in sorted(different.items()))
            raise CheckpointError(
                f"the data state belongs to another stream: {shown}; restore the old values, or start anew"
            )
        check_position(state["position"])
        self.position = int(state["position"])


def order_in_words(stream: Any) -> str:
    """What decides the order of a stream's samples, equal for equal orders: its state but for the place in it.

    Args:
        stream: anything with the `state_dict` of a sampler.
    """
    return ", ".join(f"{key} {value}" for key, value in sorted(stream.state_dict().items()) if key != "position")


def check_position(position: Any) -> None:
    """Refuse a saved position that cannot be one.

    Raises:
        CheckpointError: It is no int of at least 0.
    """
    if not isinstance(position, int) or isinstance(position, bool) or position < 0:
        raise CheckpointError(f"the data state's position is {position!r}; it must be an int of at least 0")


def check_holds_a_batch(samples: int, global_batch_size: int, data_parallel_size: int) -> None:
    """Refuse a dataset that cannot fill one global batch.

    Raises:
        ConfigError: With the numbers.
    """
    if samples < global_batch_size:
        raise ConfigError(
            f"the dataset has {samples} samples, fewer than one global batch of {global_batch_size} (micro_batch_size "
            f"{global_batch_size // data_parallel_size} x data_parallel_size {data_parallel_size}); make "
            "the micro batch (train.train_micro_batch_size) smaller or the dataset larger"
        )


def check_at_least(least: int, **values: int) -> None:
    """Refuse what is no int, or less than `least`.

    Raises:
        ConfigError: Naming the argument.
    """
    for name, value in values.items():
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} is {value!r}; it must be an int of at least {least}")
