"""Calls a dataset in the context of the samples to read, counts the time, and names the samples in errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Callable, TypeVar

import numpy as np

from libai_data.data.attributes import batch_method_of
from libai_data.data.items import check_kept, contents_of, first_in_one_place
from libai_data.data.nesting import TEXT
from libai_data.data.random.global_generators import GlobalDraws
from libai_data.data.random.sample_random import SampleKeys, reading_samples
from libai_data.data.transforms.timing import take_transform_time, this_thread
from libai_data.errors import SampleError, SchemaError, failed_reading, indices_in_words
from libai_data.loader.failures import SkippedSample
from libai_data.loader.stage_times import NO_TIMES, StageTimes
from libai_data.structures import Instance

Result = TypeVar("Result")

ALL = slice(None)
"""All rows of the samples that are read together."""

_TIMES_COMPARED = 8
"""How many of the first lists of samples are checked for samples that share memory; later lists are checked rarely."""


class WatchedDataset:
    """A dataset whose samples draw by `seed`, epoch and index alone, and whose calls are timed."""

    reads_once = False
    """Whether the samples were read before, by another thread, and are only handed out."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.draws = GlobalDraws(type(dataset).__name__)
        self._get_items = batch_method_of(dataset, "__getitems__")
        self._times_together = 0
        self._skipped: list[SkippedSample] = []
        self._times = StageTimes()
        self._reports_times = True

    def count_into(self, times: StageTimes) -> None:
        """Add times to `times` from now on, instead of reporting them."""
        self._times, self._reports_times = times, False

    def take_report(self) -> tuple[StageTimes, Sequence[SkippedSample]]:
        """Times and skipped samples since the last call."""
        times, skipped = NO_TIMES, self._skipped
        if self._reports_times:
            times, self._times = self._times, StageTimes()
        if not skipped:
            return times, ()
        self._skipped = []
        return times, skipped

    @property
    def skipped(self) -> int:
        """Number of skipped samples since the last report."""
        return len(self._skipped)

    def forget_skipped(self, count: int) -> None:
        """Keep the first `count` skipped samples since the last report; the samples after them are read again."""
        del self._skipped[count:]

    def count_idle(self, seconds: float) -> None:
        """Count seconds in which there was nothing to read."""
        self._times.idle += seconds

    def count_transform(self) -> None:
        """Count the time that this thread has spent in transforms since it was counted last."""
        self._times.transform += take_transform_time()

    def _get(self, epoch: int, index: int) -> Any:
        key = self.seed, epoch, index
        return self.draws.around(partial(self._get_watched, key), key)

    def _get_watched(self, key: tuple[int, int, int]) -> Any:
        start = started()
        try:
            with reading_samples((key,)) as reading:
                # Some datasets, such as Hugging Face's, return other dtypes by `[index]` than by `__getitems__`.
                sample = self.dataset[key[2]] if self._get_items is None else self._listed([key[2]])[0]
            self._note_replaced(reading)
            return sample
        except BaseException as error:
            raise self._failure(f"sample {key[2]}", error) from error
        finally:
            self._count(perf_counter() - start, 1)

    def _note_replaced(self, reading: reading_samples) -> None:
        if reading.replaced:
            self._skipped += [SkippedSample(*note) for note in reading.replaced]

    def _together(self, read: Callable[..., Result], epochs: np.ndarray, indices: np.ndarray) -> Result:
        """Read by one call of `read(ALL, epochs, indices)`, which first asks `_each` whether samples draw."""
        read_all = partial(read, ALL, epochs, indices)
        # If the samples were read before, another thread reads meanwhile, and may draw.
        return read_all() if self.reads_once else self.draws.around(read_all)

    def _each(self, read: Callable[..., Result], epochs: np.ndarray, indices: np.ndarray) -> list[Result]:
        """Read samples that draw from global generators, by one call of `read(row, epochs, indices)` each."""
        keys = SampleKeys(self.seed, epochs, indices)
        each = [slice(row, row + 1) for row in range(len(indices))]
        return [
            self.draws.around(partial(read, rows, epochs[rows], indices[rows]), key) for rows, key in zip(each, keys)
        ]

    def _get_together(self, epochs: np.ndarray, indices: np.ndarray) -> list[Any]:
        def get(some: slice, epochs: np.ndarray, indices: np.ndarray) -> list[Any]:
            if some is ALL and self.draws.found:
                return [sample for samples in self._each(get, epochs, indices) for sample in samples]
            start, asked = started(), indices.tolist()
            try:
                with reading_samples(SampleKeys(self.seed, epochs, indices)):
                    return self._listed(asked)
            except BaseException as error:
                raise self._failure(f"one of the samples {indices_in_words(asked)}", error) from error
            finally:
                self._count(perf_counter() - start, len(asked))

        all_samples = self._together(get, epochs, indices)
        self._times_together += 1
        is_due = self._times_together <= _TIMES_COMPARED or not self._times_together & (self._times_together - 1)
        if not is_due or self.reads_once:
            return all_samples
        row = first_in_one_place(all_samples, indices.tolist())
        if row is not None:
            before = contents_of(all_samples[row])
            [again] = self._together(get, epochs[row : row + 1], indices[row : row + 1])
            check_kept(all_samples[row], before, again, type(self.dataset).__name__)
        return all_samples

    def _listed(self, indices: list[int]) -> list[Any]:
        """The samples by `__getitems__`; a SchemaError if it does not return a list of them."""
        found = self._get_items(indices)  # type: ignore[misc]
        is_list = isinstance(found, Iterable) and not isinstance(found, (*TEXT, Mapping, Instance))
        samples = list(found) if is_list else []
        if len(samples) != len(indices):
            what = f"{len(samples)} samples" if is_list else f"a {type(found).__name__}"
            raise SchemaError(
                f"__getitems__ returned {what} for {len(indices)} indices; return a list of a sample for each index"
            )
        return samples

    def _count(self, source: float, samples: int, copy: float = 0.0) -> None:
        times, transform = self._times, take_transform_time()
        times.source += source - transform
        times.transform += transform
        times.copy += copy
        times.samples += samples

    def _failure(self, which: str, error: BaseException) -> SampleError:
        return failed_reading(f"{which} of {type(self.dataset).__name__}", error)


def started() -> float:
    """The time at which reading begins. Earlier transforms of this thread were not for the loader, and do not count."""
    this_thread.transform = 0.0
    return perf_counter()
