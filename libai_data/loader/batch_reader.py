"""Reading batches: a batch is split into tasks, and read into a slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from libai_data.data.datasets.stream_transform import place_and_offset
from libai_data.data.nesting import Skeleton, put_together
from libai_data.data.random.global_generators import warn_once
from libai_data.data.samplers.cursor import IndexBatch
from libai_data.data.transforms.batch import EVEN_LISTS, BatchTransform, check_rows_together, rows_together
from libai_data.errors import ConfigError, SchemaError, nearest
from libai_data.loader.executor import Collated, Executor, InProcessExecutor, Task, TaskResult
from libai_data.loader.failures import FailureLog, SkippedSample
from libai_data.loader.reading import row_slices
from libai_data.loader.row_writer import Rows
from libai_data.loader.sample_form import SampleForm
from libai_data.loader.schema import Layout, SampleSchema, SchemaMismatch, TensorPart, first_error, own_parts
from libai_data.loader.slots import ArraySpec, Slot, SlotList, bytes_of
from libai_data.loader.stage_times import NO_TIMES, StageTimes
from libai_data.structures import BatchInfo, new_info

_INDEX_BYTES = 16
"""Bytes for epoch and index of a sample, which a slot has in addition to the batch."""

_LEAST_SAMPLES_TIMED = 2
"""How many samples show what a sample costs; the first one alone, which may open files, does not."""
_LEAST_SECONDS_OF_A_TASK = 0.002


class PendingBatch:
    """A batch whose tasks were submitted."""

    slot: Slot | None = None
    specs: tuple[ArraySpec, ...] = ()  # of the arrays that are read directly into the slot
    tasks_left = 0
    abandoned = False
    collated: Collated | None = None
    error: Exception | None = None
    skipped: Sequence[SkippedSample] = ()

    def __init__(self, index_batch: IndexBatch) -> None:
        self.index_batch = index_batch
        self.rows = len(index_batch.indices)  # rows of the batch that this reader reads


class ReadyBatch(NamedTuple):
    """A batch that has been read."""

    index_batch: IndexBatch  # its samples
    # Array of each field; if these are views of a slot, the slot becomes free when the last view is gone.
    arrays: dict[str, np.ndarray]
    layouts: dict[str, Layout]  # of each field
    skeleton: Skeleton | None  # how the batch is nested; None if all its fields are tensors
    slot: Slot | None  # the memory of the batch; None if a collator of this process made the batch elsewhere
    specs: tuple[ArraySpec, ...]  # where each array is within the slot
    parts: frozenset[str] = frozenset()  # fields of which only this tensor-parallel rank's part was read


class BatchReader:
    """Reads batches through an executor.

    If `is_unusable` is set, an interrupt may have lost a task or slot, so the reader must not be used again.

    Args:
        layouts: field name -> changed entries of its layout.
        collates: whether the executor collates whole batches, instead of writing samples into slots.
        parts: the most tasks that a batch is split into. Several, so that one slow sample does not delay the others.
        tensor_part: this rank's place on the tensor axis, if the dataset can read parts of samples.
        shards: number of data-parallel ranks that share a global batch.
        restarts: whether the positions of the stream begin at 0 in each epoch.

    Attributes:
        first_read: epoch and index of a sample that every rank reads first; None for this rank's own first sample.
        error: error of the last delivered batch; None if it has none.
        common_sample: epoch, index and checksum of the sample that was read first; None before, or without a checksum.
    """

    def __init__(
        self,
        executor: Executor,
        slot_list: SlotList,
        layouts: Mapping[str, Mapping[str, Any]],
        collates: bool,
        parts: int,
        failures: FailureLog,
        times: StageTimes,
        tensor_part: TensorPart | None = None,
        batch_transform: BatchTransform | None = None,
        shards: int = 1,
        restarts: bool = False,
    ) -> None:
        self.times = times
        self.common_sample: tuple[int, int, int] | None = None
        self.first_read: tuple[int, int] | None = None
        self.is_unusable = False
        self.error: Exception | None = None
        self._executor = executor
        # Reads whole batches in this thread, without tasks; None if each batch needs a task.
        self._in_place = executor if isinstance(executor, InProcessExecutor) and batch_transform is None else None
        self._slot_list = slot_list
        self._layouts = layouts
        self._collates = collates
        self._parts = parts
        self._failures = failures
        self._tensor_part = tensor_part
        self._transforms = batch_transform is not None
        self._together = rows_together(batch_transform)
        self._shards = shards
        self._restarts = restarts
        self._schema: SampleSchema | None = None
        self._layouts_of_schema: dict[str, Layout] = {}
        self._read_in_part: frozenset[str] = frozenset()
        self._tasks: dict[int, PendingBatch] = {}
        self._next_task = 0
        self._collated_bytes = 0
        self._collated_form: tuple[Skeleton | None, dict[str, np.dtype]] | None = None
        self._rows_delivered, self._has_warned = 0, False

    @property
    def reads_first_sample(self) -> bool:
        """Whether the reader first reads one sample, to learn the schema from it."""
        return self._schema is None and not self._collates

    def submit(self, index_batch: IndexBatch) -> PendingBatch:
        """Submit a batch's tasks to the executor.

        Raises:
            ConfigError: The number of rows per rank is no multiple of what the batch transform needs.
        """
        if self._together > 1:
            rows = index_batch.size // self._shards
            check_rows_together(self._together, rows, f"batch {index_batch.step}", EVEN_LISTS)
        pending = PendingBatch(index_batch)
        if self._collates:
            self._send_whole(pending)
            return pending
        if self._schema is None:
            self._begin(pending)
        else:
            self._prepare_slot(pending, self._schema)
            self._send_parts(pending, first_row=0)
        return pending

    def _send_whole(self, pending: PendingBatch) -> None:
        if self._executor.collates_into_slots:
            pending.slot = self._slot_list.acquire(max(self._collated_bytes, _INDEX_BYTES * pending.rows))
        self._send(pending, slice(0, pending.rows))

    def _begin(self, pending: PendingBatch) -> None:
        """Read the first sample, learn the schema from it, and submit the rest of its batch."""
        batch = pending.index_batch
        own = int(batch.epochs[0]), int(batch.indices[0])
        first = self.first_read or own
        sample = self._first_sample(pending, *first)
        if sample is None:
            return
        skipped, pending.skipped = pending.skipped, ()
        try:
            schema = SampleSchema.of(sample)
            if self._tensor_part is not None:
                schema = schema.for_tensor_part(self._tensor_part, self._layouts)
            fields = own_parts(schema, sample.fields)
            if not schema.has_text:
                self._layouts_of_schema = self._overridden(schema.layouts)
        except Exception as error:
            pending.error = error
            return
        if sample.checksum is not None:
            self.common_sample = *first, sample.checksum
        self._schema, self._read_in_part = schema, frozenset(schema.parts)
        self._executor.use_schema(schema)
        if schema.has_text:
            self._collates, self._in_place = True, None
            self._send_whole(pending)
            return
        slot = self._prepare_slot(pending, schema)
        if self._transforms or first != own:
            # A task reads the first row: the batch transform needs other rows beside it, or `first` is another rank's.
            self._send_parts(pending, first_row=0)
            return
        Rows(schema, self._slot_list.arrays(slot, pending.specs)).write(0, fields)
        pending.skipped = skipped
        self._send_parts(pending, first_row=1)

    def _first_sample(self, pending: PendingBatch, epoch: int, index: int) -> SampleForm | None:
        """Read one sample by a task of its own; None if that fails. No other task is under way before the schema."""
        slot = self._slot_list.acquire(_INDEX_BYTES) if self._executor.collates_into_slots else None
        task = Task(self._next_task, np.array([epoch]), np.array([index]), 0, 1, slot)
        self._next_task += 1
        result = self._executor.submit(task) or self._executor.next_result()
        if slot is not None:
            self._slot_list.give_back(slot)
        self._add_result(pending, result)
        return result.first

    def _prepare_slot(self, pending: PendingBatch, schema: SampleSchema) -> Slot:
        pending.specs, size = schema.laid_out(pending.rows)
        pending.slot = slot = self._slot_list.acquire(size + _INDEX_BYTES * pending.rows)
        return slot

    def _send_parts(self, pending: PendingBatch, first_row: int) -> None:
        parts = 1 if self._parts == 1 else self._number_of_tasks(pending.rows)
        if parts == 1:
            self._send(pending, slice(first_row, pending.rows))
            return
        for rows in row_slices(pending.rows - first_row, parts, self._together):
            self._send(pending, slice(rows.start + first_row, rows.stop + first_row))

    def _number_of_tasks(self, rows: int) -> int:
        """The number of tasks of a batch: fewer if samples are cheap, because submitting a task has a cost."""
        times = self.times
        if times.samples < _LEAST_SAMPLES_TIMED:
            return self._parts
        seconds = times.busy / times.samples * rows
        return max(1, min(self._parts, ceil(seconds / _LEAST_SECONDS_OF_A_TASK)))

    def _send(self, pending: PendingBatch, rows: slice) -> None:
        batch, count = pending.index_batch, pending.rows
        epochs, indices, first = batch.epochs, batch.indices, rows.start
        if rows.stop - first < count:
            epochs, indices = epochs[rows], indices[rows]
        # A batch transform must not draw the same for a batch in each epoch.
        position = batch.position + ((batch.epoch or 0) << 32 if self._restarts else 0)
        task = Task(self._next_task, epochs, indices, first, count, pending.slot, position=position)
        self._next_task += 1
        result = self._executor.submit(task)
        if result is not None:
            self._add_result(pending, result)
            return
        self._tasks[task.number] = pending
        pending.tasks_left += 1

    def wait(self, pending: PendingBatch) -> None:
        """Process results, of this batch and of others, until all tasks of this batch are done."""
        while pending.tasks_left:
            self._process_result(self._executor.next_result())

    def _process_result(self, result: TaskResult) -> None:
        owner = self._tasks.pop(result.number)
        owner.tasks_left -= 1
        self._add_result(owner, result)
        if owner.abandoned and not owner.tasks_left:
            self._give_back(owner)

    def _add_result(self, owner: PendingBatch, result: TaskResult) -> None:
        """Add the result of a task to its batch."""
        if result.error is not None:
            owner.error = first_error(owner.error, result.error)
        if result.skipped:
            owner.skipped = [*owner.skipped, *result.skipped]
        if result.times is not NO_TIMES:
            self.times.add(result.times)
        if result.warning and not self._has_warned:
            self._has_warned = True
            warn_once("%s", result.warning)
        if result.collated is not None:
            owner.collated = result.collated

    def is_done(self, pending: PendingBatch) -> bool:
        """Whether all tasks of a batch are done; processes the results that are available."""
        while pending.tasks_left and self._executor.has_result():
            self._process_result(self._executor.next_result())
        return not pending.tasks_left

    def finish(self, pending: PendingBatch) -> ReadyBatch:
        """Wait for a batch, and raise its error if it has one; its slot becomes free when the last view is gone."""
        if pending.tasks_left:
            self.wait(pending)
        self._deliver(pending.index_batch, pending.error, pending.skipped)
        collated, slot = pending.collated, pending.slot
        if collated is not None:
            layouts, arrays, specs = self._overridden(collated.layouts), collated.arrays, collated.specs
            skeleton = self._checked(collated)
            if slot is not None and arrays:  # The slot is too small.
                self._give_back(pending)
                slot, specs, arrays = self._slot_list.copied(arrays)
            elif slot is not None:
                arrays = self._slot_list.hand_out(slot, specs)
            self._collated_bytes = max(self._collated_bytes, bytes_of(specs))
        elif self._schema is not None and slot is not None:
            layouts, skeleton, specs = self._layouts_of_schema, self._schema.skeleton, pending.specs
            arrays = self._slot_list.hand_out(slot, specs)
        else:
            raise RuntimeError("a batch without an error has been neither read nor collated")
        pending.slot = None
        return _new_ready((pending.index_batch, arrays, layouts, skeleton, slot, specs, self._read_in_part))

    def read(self, index_batch: IndexBatch) -> ReadyBatch:
        """Submit and finish a batch; without a task if the executor reads in this thread. See `finish`."""
        schema, executor, batch = self._schema, self._in_place, index_batch
        if schema is None or executor is None:
            pending = self.submit(batch)
            try:
                return self.finish(pending)
            finally:
                self._give_back(pending)
        rows = len(batch.indices)
        specs, size = schema.laid_out(rows)
        slot = self._slot_list.acquire(size + _INDEX_BYTES * rows)
        error, skipped = executor.read(schema, slot, batch.epochs, batch.indices)
        try:
            self._deliver(batch, error, skipped)
        except Exception:
            self._slot_list.give_back(slot)
            raise
        arrays = self._slot_list.hand_out(slot, specs)
        layouts, parts = self._layouts_of_schema, self._read_in_part
        return _new_ready((batch, arrays, layouts, schema.skeleton, slot, specs, parts))

    def _deliver(self, batch: IndexBatch, error: Exception | None, skipped: Sequence[SkippedSample]) -> None:
        """Count a batch that was read; raises its error, or an error if too many samples were skipped."""
        rows = len(batch.indices)
        if isinstance(error, SchemaMismatch):
            alike = self._rows_delivered + rows - error.looked_at
            error = error.with_counts({error.expected: alike}, alike)
        over_budget = self._failures.deliver(rows if batch.next_start is None else _samples_read(batch), skipped)
        error = self.error = error or over_budget
        if error is not None:
            raise error
        self._rows_delivered += rows

    def _checked(self, collated: Collated) -> Skeleton | None:
        """Raise an error if nesting, fields or dtypes differ from those of the first batch; shapes may differ."""
        dtypes = {name: array.dtype for name, array in collated.arrays.items()}
        dtypes.update((spec.name, spec.dtype) for spec in collated.specs)
        if self._collated_form is None:
            self._collated_form = collated.skeleton, dtypes
        skeleton, before = self._collated_form
        if skeleton != collated.skeleton:
            newer, older = (  # A batch whose fields are all tensors has no skeleton.
                put_together(each, lambda leaf: leaf.text or "tensor") if each else dict.fromkeys(names, "tensor")
                for each, names in ((collated.skeleton, dtypes), (skeleton, before))
            )
            raise SchemaError(
                f"a batch is nested as {newer}, but the batch before it as {older}; nest all batches alike. Instead of "
                "a list or tuple with an entry for each sample, return one tensor, or a list of strings"
            )
        if set(before) != set(dtypes):
            raise SchemaError(f"a batch has the fields {list(dtypes)}, but the batch before it has {list(before)}")
        for name, dtype in dtypes.items():
            if dtype != before[name]:
                raise SchemaError(
                    f"field '{name}' of a batch is {dtype}, but {before[name]} in the batch before it; convert all "
                    "samples to one dtype"
                )
        return collated.skeleton

    def abandon(self, batches: Iterable[PendingBatch]) -> None:
        """Drop batches that are no longer needed. Tasks that no worker has claimed are cancelled."""
        for pending in batches:
            pending.abandoned = True
            if not pending.tasks_left:
                self._give_back(pending)
        for result in self._executor.cancel():
            self._process_result(result)
        while self._executor.has_result():
            self._process_result(self._executor.next_result())

    def _give_back(self, pending: PendingBatch) -> None:
        if pending.slot is not None:
            self._slot_list.give_back(pending.slot)
            pending.slot = None

    def _overridden(self, layouts: dict[str, Layout]) -> dict[str, Layout]:
        if not self._layouts:
            return layouts
        for name in self._layouts:
            if name not in layouts:
                raise ConfigError(
                    f"layouts.{name}: the samples have no such field; they have {list(layouts)}."
                    f"{nearest(name, layouts)}"
                )
        return {name: replace(layout, **self._layouts.get(name, {})) for name, layout in layouts.items()}


_new_ready = partial(tuple.__new__, ReadyBatch)


def _samples_read(batch: IndexBatch) -> int:
    """About how many samples of the dataset a batch of a stream transform used: an output is made of several."""
    rows = len(batch.indices)
    if rows == 1:
        return 1
    places, _ = place_and_offset(batch.indices)
    if isinstance(batch.next_start, tuple):  # Between the places of one lane are the places of all other lanes.
        return int((places.max() - places.min()) * rows / batch.size)
    return int((places[-1] - places[0]) * rows / (rows - 1))


def info_of(batch: IndexBatch) -> BatchInfo:
    """The `BatchInfo` of a batch."""
    return new_info((batch.step, batch.epoch, batch.position, batch.size, batch.valid, batch.next_start))
