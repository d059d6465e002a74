"""Executors: they read in this thread, in other threads or in processes, with the same tasks, rows and results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Callable, NamedTuple

import numpy as np

from libai_data.data.items import fields_in, leaves_of_batch, named
from libai_data.data.nesting import Skeleton, is_flat, is_texts, text_to_array
from libai_data.data.random.global_generators import GlobalDraws, warn_once
from libai_data.data.random.hashing import combine64
from libai_data.data.random.sample_random import BatchRandom, SampleKeys, reading_samples
from libai_data.data.transforms.batch import BatchTransform
from libai_data.data.transforms.mixup import Mixup
from libai_data.data.transforms.timing import transform_time
from libai_data.errors import SampleError, comes_from_signal_handler, error_text, failed_reading, indices_in_words
from libai_data.loader.collate import Collator, is_own
from libai_data.loader.default_collate import default_collate
from libai_data.loader.failures import ErrorPolicy, SkippedSample
from libai_data.loader.reading import SampleReader
from libai_data.loader.row_writer import Rows
from libai_data.loader.sample_form import SampleForm
from libai_data.loader.schema import Layout, SampleSchema, array_of, layout_of
from libai_data.loader.slots import ArraySpec, Slot, SlotList
from libai_data.loader.stage_times import NO_TIMES, StageTimes
from libai_data.loader.threaded_reader import ThreadedReader

_MOST_TASKS_REMEMBERED = 256
_DRAWS_OF_BATCHES = 1
_LONGEST_WAIT = 3.0


class Task(NamedTuple):
    """Some samples of one batch that one worker reads."""

    number: int  # unique within a loader
    epochs: np.ndarray  # int64 [n]
    indices: np.ndarray  # int64 [n]
    first_row: int  # row in the batch of the first of these samples
    batch_rows: int  # rows of the whole batch
    slot: Slot | None = None  # the slot to read into; None if an executor collates into memory of its own
    substitute_only: bool = False  # workers died or hung over these samples; only substitutes are read
    position: int = 0  # position in the stream of the global batch's first sample


@dataclass(frozen=True)
class Collated:
    """A batch that a collator made: its arrays, or where they are in its slot."""

    layouts: dict[str, Layout]  # of each field
    skeleton: Skeleton | None = None  # how the batch is nested; None if all its fields are tensors
    # Array of each field, if trainer and reader share an address space, or if the slot is too small.
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    specs: tuple[ArraySpec, ...] = ()  # otherwise: where each field is within the slot


class TaskResult(NamedTuple):
    """Result of a task: done, collated, or failed with `error`; and the seconds of each stage."""

    number: int
    error: Exception | None = None
    collated: Collated | None = None
    times: StageTimes = NO_TIMES
    skipped: Sequence[SkippedSample] = ()
    first: SampleForm | None = None  # the sample from which the schema is learned
    warning: str = ""  # message for the user, if a sample differed when it was read again

    @property
    def says_only_done(self) -> bool:
        """Whether the task is done, and the result has nothing but the times."""
        has_more = self.skipped or self.warning
        return self.error is None and self.collated is None and not has_more and self.first is None


class Executor:
    """Reads samples for a loader, in this process or in others."""

    collates_into_slots = False
    """Whether a collated batch is in a slot."""

    def use_schema(self, schema: SampleSchema) -> None:
        """Require this schema of all samples from now on. Tasks before read a sample to learn the schema from."""
        raise NotImplementedError

    def submit(self, task: Task) -> TaskResult | None:
        """Append a task to those that wait; returns its result if the executor ran it at once."""
        raise NotImplementedError

    def next_result(self) -> TaskResult:
        """Wait until some submitted task is done; returns its result."""
        raise NotImplementedError

    def has_result(self) -> bool:
        """Whether `next_result` would not wait."""
        return False

    def cancel(self) -> list[TaskResult]:
        """Drop the tasks that no worker has begun; returns them as done."""
        return []

    def close(self) -> None:
        """End the threads or processes that read."""


@dataclass(frozen=True)
class Payload:
    """What a worker needs of its loader."""

    dataset: Any
    collator: Collator | None  # makes a batch of a list of samples; None reads directly into slots, without text
    seed: int
    policy: ErrorPolicy
    batch_transform: BatchTransform | None = None
    names: tuple[str, ...] | None = None
    init: Callable[[int], Any] | None = None
    threads: int = 1
    reads_first_twice: bool = False
    reads_once: bool = False


class TaskRunner:
    """Runs tasks; each thread that reads has its own runner."""

    is_trainers = False
    """Whether the trainer's own thread runs the tasks."""

    def __init__(self, payload: Payload, slot_list: SlotList) -> None:
        common = payload.dataset, payload.seed, payload.policy, payload.names
        self.reader = ThreadedReader(*common, payload.threads) if payload.threads > 1 else SampleReader(*common)
        self.reader.reads_first_twice, self.reader.reads_once = payload.reads_first_twice, payload.reads_once
        self._batch_transform = payload.batch_transform
        self._schema: SampleSchema | None = None
        self._collator = collator = payload.collator
        self._names = payload.names
        self._name = "" if collator is None else f"collate_fn {getattr(collator, '__name__', type(collator).__name__)}"
        self.batch_draws = GlobalDraws(self._name or type(self._batch_transform).__name__)
        self._slot_list = slot_list
        self._rows_of: dict[tuple[int, ...], Rows] = {}

    @property
    def schema(self) -> SampleSchema | None:
        """The schema that all samples must have; None until it is known."""
        return self._schema

    @schema.setter
    def schema(self, schema: SampleSchema) -> None:
        self._schema = schema
        if schema.has_text:
            self._collator = default_collate

    @property
    def reads_first_sample(self) -> bool:
        """Whether the next task reads one sample, to learn the schema from it."""
        return self._schema is None and self._collator is None

    def run(self, task: Task) -> TaskResult:
        """Run a task; a failure is part of the result, because the loader raises it when it is the batch's turn."""
        error: Exception | None = None
        collated: Collated | None = None
        first: SampleForm | None = None
        try:
            if self.reads_first_sample:
                first = self.reader.first_sample(int(task.epochs[0]), int(task.indices[0]), task.substitute_only)
            elif self._collator is None and self._batch_transform is None:
                self._read(task)
            else:
                collated = self._make_batch(task)
        except Exception as caught:
            error = caught
        warning = self.reader.take_warning(self.batch_draws, self.reader.draws)
        times, skipped = self.reader.take_report()
        return TaskResult(task.number, error, collated, times, skipped, first, warning)

    def _make_batch(self, task: Task) -> Collated | None:
        """Run a task with a collator or a batch transform, which may draw random numbers, too."""
        skipped = self.reader.skipped

        def read() -> Collated | None:
            # `around` may call this again. Then the samples are read again, too: a collator may have changed them.
            self.reader.forget_skipped(skipped)
            return self._read(task) if self._collator is None else self._collate(self._collator, task)

        if is_own(self._collator) and (self._batch_transform is None or type(self._batch_transform) is Mixup):
            return read()  # Nothing draws here; another thread may, if it reads a stream.
        # The seed is another one than for samples, so that the batch does not repeat the draws of its first sample.
        key = combine64(self.reader.seed, _DRAWS_OF_BATCHES), int(task.epochs[0]), int(task.indices[0])
        made = self.batch_draws.around(read, key)
        if self.batch_draws.found:
            warn_once(
                "%s draws from %s for several rows at once. These draws are the same in each run, but differ between "
                "meshes. Draw in the dataset; in a collate_fn, from libai_data.data.random.sample_generators(), one "
                "for each row; in a BatchTransform, from the BatchRandom that it is given",
                self._name or type(self._batch_transform).__name__,
                ", ".join(sorted(self.batch_draws.found)),
            )
        return made

    def _collate(self, collator: Collator, task: Task) -> Collated:
        samples = self.reader.samples_to_collate(task.epochs, task.indices)
        if not is_own(collator):
            # Copies of dicts, because a dataset may keep its samples, and a collate_fn may remove fields.
            samples = [dict(sample) if type(sample) is dict else sample for sample in samples]
        try:
            with reading_samples(SampleKeys(self.reader.seed, task.epochs, task.indices)):
                collated = collate(collator, samples, self._names)
        except BaseException as error:
            # Wrapped, because a bare StopIteration would silently end the trainer's loop.
            name = self._name or "stacking"
            raise failed_reading(f"{name} of samples {indices_in_words(task.indices)}", error) from error
        is_overwritten = task.slot is None and not is_own(collator)
        if is_overwritten or self._batch_transform is not None:
            # The collator may keep its memory, and write the next batch into it, or return it again.
            collated = replace(collated, arrays=self._copies(collated.arrays))
        if self._batch_transform is not None:
            self._transform(self._batch_transform, collated.arrays, task)
        return collated

    def _copies(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if not self.is_trainers:
            return {name: array.copy() for name, array in arrays.items()}
        # In memory that is used again: the system clears new memory, which can take ten times as long as copying.
        return self._slot_list.copied(arrays)[2]

    def _read(self, task: Task) -> Collated | None:
        schema = self._schema
        if task.slot is None or schema is None:
            raise RuntimeError("a task without a collator needs a slot and a schema")
        rows = self.rows(schema, task.slot, task.batch_rows, task.first_row, len(task.indices))
        if task.substitute_only:
            self.reader.substitute_into(rows, task.epochs, task.indices)
        else:
            self.reader.read_into(rows, task.epochs, task.indices)
        if self._batch_transform is not None:
            self._transform(self._batch_transform, dict(rows), task)
        return None

    def _transform(self, transform: BatchTransform, rows: dict[str, np.ndarray], task: Task) -> None:
        try:
            with transform_time(), reading_samples(SampleKeys(self.reader.seed, task.epochs, task.indices)):
                transform(rows, BatchRandom(self.reader.seed, task.position, task.epochs, task.indices))
        except BaseException as error:
            raise failed_reading(
                f"{type(transform).__name__} of samples {indices_in_words(task.indices)}", error
            ) from error
        finally:
            self.reader.count_transform()

    def rows(self, schema: SampleSchema, slot: Slot, batch_rows: int, first: int, count: int) -> Rows:
        """Some rows of a batch in a slot; cached, because slots are reused."""
        place = slot.offset, slot.size, batch_rows, first, count
        rows = self._rows_of.get(place)
        if rows is None:
            if len(self._rows_of) >= _MOST_TASKS_REMEMBERED:
                self._rows_of.clear()
            rows = Rows(schema, self._slot_list.arrays(slot, schema.laid_out(batch_rows)[0]))
            if count < batch_rows:
                rows = rows.of(slice(first, first + count))
            self._rows_of[place] = rows
        return rows


class Stuck:
    """Counts for how many seconds each worker has had the same task, while the trainer waits and looks now and then.

    Other seconds do not count: neither those of a trainer that is busy elsewhere, nor those in which the whole job was
    suspended (Ctrl-Z, a scheduler).
    """

    def __init__(self, workers: int) -> None:
        self._looked, self._passed = time.monotonic(), 0.0
        self._stuck: list[tuple[Any, float]] = [(None, 0.0)] * workers

    def look(self) -> None:
        """Begin to look at the workers."""
        before, self._looked = self._looked, time.monotonic()
        self._passed = self._looked - before if self._looked - before < _LONGEST_WAIT else 0.0

    def seconds(self, worker: int, task: Any) -> float:
        """For how many seconds a worker has had this task; None if it has none."""
        before, seconds = self._stuck[worker]
        seconds = 0.0 if task is None or task != before else seconds + self._passed
        self._stuck[worker] = task, seconds
        return seconds


def wants_to_end(indices: list[int], error: BaseException) -> SampleError:
    """Make a SampleError of a SystemExit or the like of a dataset, which must not end a worker or the trainer."""
    wrapped = SampleError(f"one of the samples {indices_in_words(indices)}: {error_text(error)}")
    wrapped.__cause__ = error
    return wrapped


def _if_of_dataset(indices: list[int], error: BaseException) -> SampleError:
    """Make a SampleError of a SystemExit or GeneratorExit in the trainer's own thread, unless a signal handler raised
    it.

    A signal handler of the user may end the program. A dataset must not: after its `sys.exit(0)`, the training would
    look complete.
    """
    if comes_from_signal_handler(error):
        raise error
    return wants_to_end(indices, error)


def collate(collator: Collator, samples: list[Any], names: Sequence[str] | None = None) -> Collated:
    """Let a collator make a batch, and split the batch into fields; `names` are used if the batch has no names."""
    batch, leaves = collator(samples), {}  # type: ignore[var-annotated]
    skeleton = leaves_of_batch(named(batch, None if fields_in(batch) is not None else names), leaves)
    layouts = {path: layout_of(value, path) for path, value in leaves.items()}
    for path, value in leaves.items():
        leaves[path] = np.asarray(text_to_array(value) if is_texts(value) else array_of(value, path), order="C")
    return Collated(layouts, None if is_flat(skeleton) else skeleton, leaves)


class InProcessExecutor(Executor):
    """Reads in the caller's own thread; `submit` runs a task at once.

    Args:
        times: the reader adds its seconds to these.
    """

    def __init__(self, runner: TaskRunner, times: StageTimes) -> None:
        self._runner = runner
        runner.is_trainers = True
        runner.reader.count_into(times)

    def use_schema(self, schema: SampleSchema) -> None:
        self._runner.schema = schema

    def submit(self, task: Task) -> TaskResult:
        try:
            return self._runner.run(task)
        except (SystemExit, GeneratorExit) as error:
            return TaskResult(task.number, _if_of_dataset(task.indices.tolist(), error))

    def read(
        self, schema: SampleSchema, slot: Slot, epochs: np.ndarray, indices: np.ndarray
    ) -> tuple[Exception | None, Sequence[SkippedSample]]:
        """Read a whole batch into a slot, without a task; returns the error, if any, and the skipped samples."""
        reader, count = self._runner.reader, len(indices)
        error: Exception | None = None
        try:
            reader.read_into(self._runner.rows(schema, slot, count, 0, count), epochs, indices)
        except Exception as caught:
            error = caught
        except (SystemExit, GeneratorExit) as caught:
            error = _if_of_dataset(indices.tolist(), caught)
        if reader.draws.unseeded and (warning := reader.take_warning(reader.draws)):
            warn_once("%s", warning)
        return error, reader.take_report()[1]

    def next_result(self) -> TaskResult:
        raise RuntimeError("all tasks were done when they were submitted")
