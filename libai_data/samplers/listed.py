"""A user's own batch sampler: any iterable of lists of indices."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from libai_data.errors import CheckpointError, ConfigError
from libai_data.mesh import get_data_parallel_size
from libai_data.samplers.sampler import IndexBatch, StreamSampler
from libai_data.samplers.stream_state import check_position


class ListedBatches:
    """Makes any iterable of index lists serve the loader.

    Such a sampler decides alone which rank reads what, and it has no place to jump to: restoring replays it from its
    beginning, so it must give the same batches again. All ranks' lists of one batch must be equally long.

    Args:
        batches: an iterable of this rank's lists of indices; iterated anew each round.
    """

    endless = False

    def __init__(self, batches: Iterable[Sequence[int]]) -> None:
        self._batches = batches
        self.position = 0
        self.epoch = -1

    @property
    def global_batch_size(self) -> None:
        """Unknown: the lists are this rank's alone."""
        return None

    def batches(self, position: int) -> Iterator[IndexBatch]:
        """This round's batches from `position`, counted in samples of all ranks together, on.

        A round that begins at 0 is a new epoch, so that random transforms draw anew.
        """
        if position == 0:
            self.epoch += 1
        epoch, start = self.epoch, 0
        for number, indices in enumerate(self._batches):
            listed = np.asarray(indices, dtype=np.int64)
            if listed.ndim != 1 or not len(listed):
                raise ConfigError(f"batch {number} of the batch_sampler is {indices!r}; it must be a list of indices")
            rows = len(listed) * get_data_parallel_size()
            if start >= position:
                yield IndexBatch(number, epoch, start, rows, rows, np.full_like(listed, epoch), listed)
            start += rows

    def state_dict(self) -> dict[str, Any]:
        """The round that was begun last (-1: none), and the number of samples that all ranks have taken in it."""
        return {"position": self.position, "epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, Any], override: Collection[str] = ()) -> None:
        """Go on after as many samples; nothing that `override` could name is known of such a sampler.

        Raises:
            CheckpointError: The state is that of another kind of sampler.
        """
        if set(state) != {"position", "epoch"}:
            raise CheckpointError(f"the data state {dict(state)} was saved by another kind of sampler")
        check_position(state["position"])
        self.position, self.epoch = int(state["position"]), int(state["epoch"])

    def batches_per_round(self) -> int:
        """The length of the iterable, if it has one."""
        return len(self._batches)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


def as_stream(batch_sampler: Any) -> Any:
    """The sampler itself if it knows positions, else wrapped in `ListedBatches`.

    Raises:
        TypeError: It is neither a sampler nor an iterable.
    """
    if isinstance(batch_sampler, StreamSampler):
        return batch_sampler
    if not hasattr(batch_sampler, "__iter__"):
        raise TypeError(
            f"batch_sampler is a {type(batch_sampler).__name__}; pass CyclicSampler, SingleRoundSampler or any "
            "iterable of lists of indices"
        )
    return ListedBatches(batch_sampler)
