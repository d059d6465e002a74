"""A user's own batch sampler: any iterable of lists of indices."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Iterator, Sequence

import numpy as np

from libai_data.errors import CheckpointError
from libai_data.samplers.sampler import IndexBatch, StreamSampler


class ListedBatches:
    """Makes any iterable of index lists serve the loader; its place is the number of batches taken.

    Such a sampler decides alone which rank reads what, and it has no place to jump to: restoring replays it from its
    beginning, so it must give the same batches again.

    Args:
        batches: an iterable of lists of indices; iterated anew each round.
    """

    endless = False

    def __init__(self, batches: Iterable[Sequence[int]]) -> None:
        self._batches = batches
        self.position = 0

    @property
    def global_batch_size(self) -> None:
        """Unknown: the lists are this rank's alone."""
        return None

    def batches(self, position: int) -> Iterator[IndexBatch]:
        """This round's batches from `position` on."""
        for number, indices in enumerate(self._batches):
            if number >= position:
                listed = np.asarray(indices, dtype=np.int64)
                yield IndexBatch(number, number, 1, 1, np.zeros_like(listed), listed)

    def state_dict(self) -> Dict[str, Any]:
        """The number of batches taken in this round."""
        return {"position": self.position}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Go on after as many batches.

        Raises:
            CheckpointError: The state is that of another kind of sampler.
        """
        if set(state) != {"position"}:
            raise CheckpointError(f"the data state {state} was saved by another kind of sampler")
        self.position = int(state["position"])

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
