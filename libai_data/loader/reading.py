"""Reading samples into the rows of a batch, in the same way in workers, threads and the trainer's own process."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from time import perf_counter
from typing import Any, Callable

import numpy as np

from libai_data.data.attributes import batch_method_of
from libai_data.data.items import ReuseCheck, selected
from libai_data.data.random.global_generators import GlobalDraws
from libai_data.data.random.sample_random import SampleKey, SampleKeys, reading_samples
from libai_data.data.random.substitute import failure_of, read_or_substitute
from libai_data.errors import SampleError, SchemaError, indices_in_words
from libai_data.loader.failures import ErrorPolicy, SkippedSample
from libai_data.loader.row_writer import BatchFiller, Rows
from libai_data.loader.sample_form import SampleForm, compared, flat_fields, form_of
from libai_data.loader.schema import SampleSchema, SchemaMismatch
from libai_data.loader.stage_times import StageTimes
from libai_data.loader.watched_dataset import ALL, Result, WatchedDataset, started
from libai_data.structures import Instance, fields_of

_MOST_REREADS = 4
_WORKERS_ENDED = "workers ended over it", "a worker that died or hung"


class SampleReader(WatchedDataset):
    """Reads samples of one dataset; each process or thread that reads has its own.

    Args:
        dataset: `dataset[index]` returns an Instance or a dict. If there is `read_batch(indices, out)`, it is called
            instead: it fills the arrays `out`, {field: [n, ...]}, with the samples `indices`, int64 [n]. Otherwise, if
            there is `__getitems__(indices)`, it is called, and returns a list of samples. If `read_batch` has `parts`,
            it gets {field: one slice per dim of a sample} for the fields that it must not read completely.
        seed: decides, with epoch and index, what random transforms draw.
        policy: what to do about a sample that fails.
        names: names of the fields of samples without names, or the fields to select; see `named`.
    """

    reads_first_twice = False  # whether the first sample is read again, and compared
    _warning, _has_warned = "", False
    _reads: SampleKey  # the sample that is read one by one

    def __init__(self, dataset: Any, seed: int, policy: ErrorPolicy, names: Sequence[str] | None = None) -> None:
        super().__init__(dataset, seed)
        self._policy = policy
        self._names = names
        # If fields are selected, `read_batch` is not called, because it fills all fields.
        read_batch = batch_method_of(dataset, "read_batch") if names is None else None
        self._read_batch = None if read_batch is None else BatchFiller(read_batch, reads_parts(dataset))
        self._reuse = ReuseCheck(type(dataset).__name__)

    def sample(self, epoch: int, index: int) -> Any:
        """Read one sample, or its substitute."""
        return self._or_substitute(epoch, index, lambda chosen: self._get(epoch, chosen))

    def first_sample(self, epoch: int, index: int, substitute_only: bool = False) -> SampleForm:
        """Read the sample from which the schema is learned, or (always, if workers ended over it) its substitute."""
        noted = len(self._skipped)
        failure = _WORKERS_ENDED if substitute_only else None
        sample = self._or_substitute(epoch, index, lambda chosen: self._get(epoch, chosen), failure)
        try:
            form = form_of(sample, self._names)
            SampleSchema.of(form)
        except SchemaError as error:
            raise SchemaError(f"sample {index} of {type(self.dataset).__name__}: {error}") from error
        except Exception as error:  # A value cannot be converted to an array.
            raise self._failure(f"sample {index}", error) from error
        if self.reads_first_twice and len(self._skipped) == noted:
            form = self._compared(sample, form, epoch, index)
        return form

    def _compared(self, sample: Any, form: SampleForm, epoch: int, index: int) -> SampleForm:
        with self._uncounted():
            form = compared(sample, form, lambda: self._get(epoch, index), type(self.dataset).__name__, index)
        self._warning = self._warning or form.warning
        return form

    def take_warning(self, *all_draws: GlobalDraws) -> str:
        """A message for the user, once, if a sample has differed when it was read again.

        Samples that seemed to draw from a generator without a seed, by one of `all_draws`, are read again.
        """
        for draws in all_draws:
            key, draws.unseeded = draws.unseeded, None
            if key is not None and not (self._warning or self._has_warned):
                _, epoch, index = key
                with suppress(Exception), self._uncounted():  # After an error, only the comparison is lost.
                    sample, times = self._get(epoch, index), 0
                    while not self._compared(sample, SampleForm({}), epoch, index).warning and times < _MOST_REREADS:
                        times += 1
        warning, self._warning = "" if self._has_warned else self._warning, ""
        self._has_warned |= bool(warning)
        return warning

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """Within the block, neither times nor skipped samples count."""
        noted, times, self._times = len(self._skipped), self._times, StageTimes()
        try:
            yield
        finally:
            self._times = times
            self.forget_skipped(noted)

    def samples_to_collate(self, epochs: np.ndarray, indices: np.ndarray) -> list[Any]:
        """Read some samples, in this order, with the selected fields."""
        samples = self._samples(epochs, indices)
        if self._names is None:
            return samples
        return [self._selected(sample, index) for sample, index in zip(samples, indices.tolist())]

    def _selected(self, sample: Any, index: int) -> Any:
        try:
            return selected(sample, self._names or ())
        except SchemaError as error:
            raise SchemaError(
                f"sample {index} of {type(self.dataset).__name__}: {error}; fields selects what the collate_fn gets. "
                "To name what the collate_fn returns, leave out fields, and return a dict"
            ) from error

    def _samples(self, epochs: np.ndarray, indices: np.ndarray) -> list[Any]:
        if self._get_items is not None and self._may_read_together(indices):
            try:
                return self._get_together(epochs, indices)
            except SampleError:
                if not self._policy.substitutes:
                    raise
        samples: list[Any] = []
        for epoch, index in zip(epochs.tolist(), indices.tolist()):
            samples.append(self.sample(epoch, index))
            self._reuse.see(samples[-1])
        self._reuse.begin()
        return samples

    def read_into(self, rows: Rows, epochs: np.ndarray, indices: np.ndarray) -> None:
        """Read samples directly into their rows; raises SchemaMismatch if a sample has another schema."""
        try:
            self._read_rows(rows, epochs, indices)
        except SchemaMismatch as mismatch:
            raise mismatch.with_counts(self._schemas(epochs, indices), len(indices)) from None

    def _read_rows(self, rows: Rows, epochs: np.ndarray, indices: np.ndarray) -> None:
        together = self._may_read_together(indices)
        if self._read_batch is not None and together:
            try:
                self._together(partial(self._fill_some, rows), epochs, indices)
                return
            except SchemaMismatch:
                raise
            except SampleError:
                if not self._policy.substitutes:
                    raise
        if self._read_batch is None and self._get_items is not None:
            for row, sample in enumerate(self._samples(epochs, indices)):
                self._write(rows, row, sample, int(indices[row]))
            return
        if self._read_batch is None and together:
            self._fill_and_substitute(rows, epochs, indices)
            return
        for row, (epoch, index) in enumerate(zip(epochs.tolist(), indices.tolist())):
            self._or_substitute(epoch, index, self._row_filler(rows, row, epoch))

    def substitute_into(self, rows: Rows, epochs: np.ndarray, indices: np.ndarray) -> None:
        """Read the substitutes of samples over which workers died or hung; see `read_into`."""
        for row, (epoch, index) in enumerate(zip(epochs.tolist(), indices.tolist())):
            self._or_substitute(epoch, index, self._row_filler(rows, row, epoch), _WORKERS_ENDED)

    def _fill_and_substitute(self, rows: Rows, epochs: np.ndarray, indices: np.ndarray) -> None:
        """Read samples one by one. If one fails and the policy allows it, read its substitute, and then the rest."""
        first = 0
        while first < len(indices):
            try:
                self.draws.around(partial(self._fill_one_by_one, rows, epochs, indices, first))
                return
            except SampleError as error:
                if not self._policy.substitutes:
                    raise
                failure, row, (_, epoch, index) = failure_of(error), self._reads.row, self._reads[0]
            self._or_substitute(epoch, index, self._row_filler(rows, row, epoch), failure)
            first = row + 1

    def _fill_one_by_one(self, rows: Rows, epochs: np.ndarray, indices: np.ndarray, first: int) -> None:
        """Read the samples of the rows from `first` on, with as little overhead as possible."""
        self._reads = keys = SampleKey(self.seed, epochs, indices)
        to_read = enumerate(indices.tolist()[first:], first)
        if self.draws.found:
            for keys.row, index in to_read:
                self._write(rows, keys.row, self._get(int(epochs[keys.row]), index), index)
            return
        dataset, schema, write = self.dataset, rows.schema, rows.write
        is_plain = schema.skeleton is None
        copy, begin = 0.0, started()
        try:
            with reading_samples(keys) as reading:
                for row, index in to_read:
                    keys.row = row
                    try:
                        sample = dataset[index]
                    except BaseException as error:
                        raise self._failure(f"sample {index}", error) from error
                    if reading.is_in_fork:
                        break  # The end of the block ends this process.
                    read = perf_counter()
                    try:
                        if type(sample) is not dict or not is_plain:
                            is_bare = is_plain and type(sample) is Instance
                            sample = sample._fields if is_bare else self._fields(schema, sample)
                        write(row, sample)
                    except SchemaError as error:
                        raise self._mismatch(schema, index, str(error)) from error
                    except BaseException as error:
                        raise self._failure(f"sample {index}", error) from error
                    copy += perf_counter() - read
            self._note_replaced(reading)
        finally:
            self._count(perf_counter() - begin - copy, keys.row + 1 - first, copy)

    def _row_filler(self, rows: Rows, row: int, epoch: int) -> Callable[[int], Any]:
        if self._read_batch is not None:
            fill = partial(self._fill_some, rows.of(slice(row, row + 1)))
            return lambda index: self._together(fill, np.array([epoch]), np.array([index]))
        return lambda index: self._write(rows, row, self._get(epoch, index), index)

    def _may_read_together(self, indices: np.ndarray) -> bool:
        return not self._policy.known_bad or self._policy.known_bad.isdisjoint(indices.tolist())

    def _or_substitute(
        self, epoch: int, index: int, read: Callable[[int], Result], failure: tuple[str, str] | None = None
    ) -> Result:
        """Read a sample. If it fails and the policy allows it, or its `failure` is known, read its substitute."""
        if failure is None and not self._policy.substitutes:
            return read(index)
        key, candidates = (self.seed, epoch, index), lambda: range(len(self.dataset))
        result, replacement = read_or_substitute(read, key, self._policy.known_bad, candidates, failure)
        if replacement is not None:
            self._skipped.append(SkippedSample(epoch, index, *replacement))
        return result

    def _fill_some(self, rows: Rows, some: slice, epochs: np.ndarray, indices: np.ndarray) -> None:
        if some is ALL and self.draws.found:
            self._each(partial(self._fill_some, rows), epochs, indices)
            return
        start, reading = started(), reading_samples(SampleKeys(self.seed, epochs, indices))
        try:
            with reading:
                self._read_batch(indices, rows if some is ALL else rows.of(some))  # type: ignore[misc]
        except BaseException as error:
            # With substitutes, the caller reads each sample alone after this error, which then finds the mismatch.
            if len(indices) == 1 or not self._policy.substitutes:
                self._raise_mismatch(rows.schema, epochs, indices)
            which = f"one of the samples {indices_in_words(indices)}"
            which = which if reading.failed is None else f"sample {reading.failed}"
            raise self._failure(which, error) from error
        finally:
            self._count(perf_counter() - start, len(indices))

    def _raise_mismatch(self, schema: SampleSchema, epochs: np.ndarray, indices: np.ndarray) -> None:
        """After `read_batch` failed, raise SchemaMismatch if one of its samples can be read but has another schema."""
        for row, index in enumerate(indices.tolist()):
            [found] = self._schemas(epochs[row : row + 1], indices[row : row + 1]) or [schema.describe()]
            if found != schema.describe():
                raise self._mismatch(schema, index, f"it has {found}")

    def _schemas(self, epochs: np.ndarray, indices: np.ndarray) -> Counter[str]:
        """How many of these samples have which schema; samples that cannot be read are left out."""
        counts: Counter[str] = Counter()
        for epoch, index in zip(epochs.tolist(), indices.tolist()):
            try:
                sample = self._get(epoch, index)
            except SampleError:
                continue
            try:
                counts[SampleSchema.of(form_of(sample, self._names)).describe()] += 1
            except SchemaError as error:
                counts[f"({error})"] += 1
        return counts

    def _mismatch(self, schema: SampleSchema, index: int, problem: str) -> SchemaMismatch:
        return SchemaMismatch(type(self.dataset).__name__, index, problem, schema.describe())

    def _write(self, rows: Rows, row: int, sample: Any, index: int) -> None:
        start = perf_counter()
        try:
            rows.write(row, self._fields(rows.schema, sample))
        except SchemaError as error:
            raise self._mismatch(rows.schema, index, str(error)) from error
        except BaseException as error:
            raise self._failure(f"sample {index}", error) from error
        finally:
            self._times.copy += perf_counter() - start

    def _fields(self, schema: SampleSchema, sample: Any) -> dict[str, Any]:
        if schema.skeleton is not None:
            return flat_fields(sample, self._names) or form_of(sample, self._names).fields
        fields = fields_of(sample)
        # A dict with defaults, such as a Counter, would make up fields that the sample lacks.
        return fields if type(fields) is dict else {name: fields[name] for name in fields}


def reads_parts(dataset: Any, names: Sequence[str] | None = None) -> bool:
    """Whether a dataset can read parts of samples: its `read_batch` has `parts`, and no fields are selected."""
    read_batch = batch_method_of(dataset, "read_batch")
    return names is None and read_batch is not None and "parts" in inspect.signature(read_batch).parameters


def row_slices(count: int, parts: int, together: int = 1) -> Sequence[slice]:
    """Cut `count` rows into up to `parts` slices of nearly equal length, each of a multiple of `together` rows."""
    blocks = count // together
    parts = min(parts, blocks)
    edges = [blocks * part // parts * together for part in range(parts)] + [count]
    return [slice(start, stop) for start, stop in zip(edges[:-1], edges[1:])]
