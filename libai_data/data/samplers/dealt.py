"""A user's own sampler of single indices, whose indices are dealt to the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from operator import length_hint
from typing import Any

import numpy as np

from libai_data.data.nesting import array_of
from libai_data.data.samplers.batch_runs import Run, rounded_up, runs_of_sampler
from libai_data.data.samplers.listed import ListedBatches, iterable_once, refuse_not_iterable
from libai_data.errors import ConfigError
from libai_data.mesh.current import broadcast_py_object, is_main_process

_LONGEST_EPOCH, _LEAST_LIMIT = 20, 10**6
"""A sampler of single indices counts as endless if it yields more indices than 20 dataset lengths and than 10**6."""


class DealtIndices(ListedBatches):
    """Cuts the indices of a sampler of single indices into global batches, and gives each rank its rows.

    Args:
        sampler: an iterable of the indices of an epoch, for all ranks together; rank 0 iterates it again in each epoch.
        drop_last: leave out the last batch if it is not full. Otherwise the last batch is short; if its rows do not
            divide over the ranks, the last row is repeated.
        samples: number of samples of the dataset; None if not known.
        together: rows that a batch transform needs together; the short last batch has a multiple of them on each rank.
    """

    _argument = "sampler"

    def __init__(
        self,
        sampler: Iterable[int],
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = False,
        samples: int | None = None,
        together: int = 1,
    ) -> None:
        size = self.global_batch_size = micro_batch_size * data_parallel_size
        super().__init__(_Chunks(sampler, size, drop_last, samples), samples)
        self._name = type(sampler).__name__
        self._rank, self._ranks, self._together = data_parallel_rank, data_parallel_size, together

    def _rank_of_lists(self) -> int:
        return 0  # All ranks have the same lists.

    def batch_runs(self) -> list[Run]:
        return runs_of_sampler(self._batches, self._rows_for)

    def _rows_for(self, valid: int) -> int:
        return rounded_up(valid, self._ranks * self._together) // self._ranks

    def _own_part(self, listed: np.ndarray, ranks: int) -> tuple[np.ndarray, int, int]:
        valid, rows = len(listed), self._rows_for(len(listed))
        padded = np.concatenate([listed, np.full(rows * ranks - valid, listed[-1])])
        return padded[self._rank * rows : (self._rank + 1) * rows], rows * ranks, valid


class _Chunks:
    """Yields the indices of a sampler in lists of one global batch; the lists are equal on all ranks."""

    def __init__(self, sampler: Any, size: int, drop_last: bool, samples: int | None) -> None:
        refuse_not_iterable("sampler", sampler, "indices")
        self._samples = samples
        self.sampler = sampler
        self.batch_size = size
        self.drop_last = drop_last
        self._iterator: Iterator[Any] | None = None

    def __len__(self) -> int:
        full, rest = divmod(len(self.sampler), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[np.ndarray]:
        drawn = self._drawn() if is_main_process() else None
        indices = np.asarray(broadcast_py_object(drawn, src=0))
        if indices.ndim != 1 or indices.dtype == object:
            raise ConfigError(
                f"the sampler ({type(self.sampler).__name__}) yields no single indices; pass lists of indices as "
                "batch_sampler"
            )
        end = len(indices) // self.batch_size * self.batch_size if self.drop_last else len(indices)
        for start in range(0, end, self.batch_size):
            yield indices[start : min(start + self.batch_size, end)]

    def _drawn(self) -> np.ndarray:
        most = max(_LEAST_LIMIT, _LONGEST_EPOCH * max(self._samples or 0, length_hint(self.sampler)))
        iterator = iter(self.sampler)
        if iterator is self._iterator:
            raise ConfigError(iterable_once(self.sampler, "sampler"))
        self._iterator = iterator
        drawn = array_of([*islice(iterator, most + 1)])
        if len(drawn) > most:
            raise ConfigError(
                f"the sampler ({type(self.sampler).__name__}) has not ended after {most} indices of an epoch, of "
                f"{self._samples or 'unknown'} samples; let it end after each epoch, or use CyclicSampler"
            )
        return drawn
