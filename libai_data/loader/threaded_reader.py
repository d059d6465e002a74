"""A reader that reads samples in several threads of one worker, for slow storage."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, TypeVar

import numpy as np

from libai_data.data.items import check_kept, contents_of
from libai_data.data.random.global_generators import share_generators, take_has_drawn
from libai_data.loader.failures import ErrorPolicy
from libai_data.loader.reading import SampleReader, row_slices
from libai_data.loader.row_writer import Rows

Result = TypeVar("Result")

_MOST_REREADS = 16
"""How often samples are read again because a global random generator has moved, whichever code moved it."""


class ThreadedReader(SampleReader):
    """Reads the samples of a task in several threads; the result is the same as with one thread."""

    def __init__(self, dataset: Any, seed: int, policy: ErrorPolicy, names: Sequence[str] | None, threads: int) -> None:
        super().__init__(dataset, seed, policy, names)
        self._readers = [SampleReader(dataset, seed, policy, names) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads, "libai_data worker thread", share_generators, (True,))
        self._rereads_left = _MOST_REREADS
        self._has_compared = False

    def _samples(self, epochs: np.ndarray, indices: np.ndarray) -> list[Any]:
        if not self._has_compared and len(indices) > 1:
            # Check once whether the first sample stays as it is while threads read the others.
            self._has_compared = True
            first = super()._samples(epochs[:1], indices[:1])
            before = contents_of(first[0])
            others = self._samples(epochs[1:], indices[1:])
            check_kept(first[0], before, others[-1], type(self.dataset).__name__)
            return [*first, *others]

        def read(reader: SampleReader, part: slice) -> list[Any]:
            return reader._samples(epochs[part], indices[part])

        parts = self._by_threads(read, len(indices))
        return super()._samples(epochs, indices) if parts is None else [sample for part in parts for sample in part]

    def _read_rows(self, rows: Rows, epochs: np.ndarray, indices: np.ndarray) -> None:
        def read(reader: SampleReader, part: slice) -> None:
            reader._read_rows(rows.of(part), epochs[part], indices[part])

        if self._by_threads(read, len(indices)) is None:
            super()._read_rows(rows, epochs, indices)

    def _by_threads(self, read: Callable[[SampleReader, slice], Result], count: int) -> list[Result] | None:
        """Read `count` samples in parts, each part by its own reader; raises the first failure, in order of the parts.

        Returns:
            The result of each part; None if the samples draw from global random generators, or seem to. Then one
            thread must read them.
        """
        if self.draws.found or self.draws.seeds:
            return None

        def watched(reader: SampleReader, part: slice) -> tuple[Future[Result], bool]:
            found: Future[Result] = Future()
            take_has_drawn()
            try:
                found.set_result(read(reader, part))
            except BaseException as error:
                found.set_exception(error)
            return found, take_has_drawn()

        parts = row_slices(count, len(self._readers))
        # Wait for all parts, also after a failure: no thread may still write into rows that are reused.
        done = list(self._pool.map(watched, self._readers, parts))
        reports = [reader.take_report() for reader, _ in zip(self._readers, parts)]
        if self._rereads_left and any(has_drawn for _, has_drawn in done):
            self._rereads_left -= 1
            return None
        for times, skipped in reports:
            self._times.add(times)
            self._skipped += skipped
        return [found.result() for found, _ in done]
