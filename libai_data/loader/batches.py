"""Batches on their way: cut into tasks, read into a slot, put together again as an Instance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Dict, Mapping, Optional, Tuple

import numpy as np

from libai_data.errors import ConfigError, SchemaError, nearest
from libai_data.global_tensor import as_flow_tensor
from libai_data.loader.executor import Executor, Task, TaskResult
from libai_data.loader.reading import row_slices
from libai_data.loader.schema import Layout, SampleSchema, array_of, layout_of
from libai_data.loader.slots import ArraySpec, Slot, SlotRing, bytes_of, lay_out
from libai_data.samplers.sampler import IndexBatch
from libai_data.structures import Agreement, BatchInfo, DistTensorData, Instance, fields_of


@dataclass
class PendingBatch:
    """A batch whose tasks are out."""

    index_batch: IndexBatch
    slot: Optional[Slot] = None
    specs: Tuple[ArraySpec, ...] = ()
    tasks_left: int = 0
    collated: Optional[TaskResult] = None
    error: Optional[Exception] = None


class BatchReader:
    """Reads batches through an executor.

    Args:
        executor: does the reading.
        ring: the slots to read into.
        layouts: field name -> changed entries of its layout.
        collates: whether the executor collates whole batches, instead of writing samples into slots.
        parts: tasks that a batch is cut into, so that one slow sample does not hold up the others.
    """

    def __init__(
        self,
        executor: Executor,
        ring: SlotRing,
        layouts: Mapping[str, Mapping[str, Any]],
        collates: bool,
        parts: int,
    ) -> None:
        self._executor = executor
        self._ring = ring
        self._layouts = layouts
        self._collates = collates
        self._parts = parts
        self._schema: Optional[SampleSchema] = None
        self._tasks: Dict[int, PendingBatch] = {}
        self._next_task = 0
        self._agreement = Agreement()

    def submit(self, index_batch: IndexBatch) -> PendingBatch:
        """Send out a batch's tasks."""
        pending = PendingBatch(index_batch)
        if self._collates:
            self._send(pending, slice(0, len(index_batch.indices)))
            return pending
        first_row = 0 if self._schema is not None else self._learn_schema(pending)
        if pending.error is None:
            self._prepare_slot(pending)
            for rows in row_slices(len(index_batch.indices) - first_row, self._parts):
                self._send(pending, slice(rows.start + first_row, rows.stop + first_row))
        return pending

    def _learn_schema(self, pending: PendingBatch) -> int:
        """Read the very first sample, from which all else is laid out; returns the number of rows read."""
        batch = pending.index_batch
        try:
            sample = self._executor.first_sample(int(batch.epochs[0]), int(batch.indices[0]))
            schema = SampleSchema.of(sample)
        except Exception as error:
            pending.error = error
            return 0
        self._schema = schema
        self._executor.use_schema(schema)
        self._prepare_slot(pending)
        rows = pending.slot.arrays(pending.specs)  # type: ignore[union-attr]
        for name, value in fields_of(sample).items():
            rows[name][0] = array_of(value, name)
        return 1

    def _prepare_slot(self, pending: PendingBatch) -> None:
        if pending.slot is None and self._schema is not None:
            count = len(pending.index_batch.indices)
            pending.specs = lay_out((spec.name, spec.dtype, (count, *spec.shape)) for spec in self._schema.fields)
            pending.slot = self._ring.acquire(bytes_of(pending.specs))

    def _send(self, pending: PendingBatch, rows: slice) -> None:
        batch = pending.index_batch
        task = Task(self._next_task, batch.epochs[rows], batch.indices[rows], pending.slot, pending.specs, rows.start)
        self._next_task += 1
        self._tasks[task.number] = pending
        pending.tasks_left += 1
        self._executor.submit(task)

    def wait(self, pending: PendingBatch) -> None:
        """Take in results, of this batch and of others, until all tasks of this batch are done."""
        while pending.tasks_left:
            result = self._executor.next_result()
            owner = self._tasks.pop(result.number)
            owner.tasks_left -= 1
            owner.error = owner.error or result.error
            owner.collated = result if self._collates else None

    def finish(self, pending: PendingBatch) -> Instance:
        """Put the batch together; its memory returns to the ring when its last tensor is gone.

        Raises:
            Exception: What a task of the batch failed with.
        """
        self.wait(pending)
        if pending.error is not None:
            self.discard(pending)
            raise pending.error
        if pending.collated is not None:
            arrays = pending.collated.arrays
            layouts = {name: layout_of(value, name) for name, value in pending.collated.fields.items()}
        else:
            arrays = self._ring.hand_out(pending.slot, pending.specs)  # type: ignore[arg-type]
            layouts = {spec.name: spec.layout for spec in self._schema.fields}  # type: ignore[union-attr]
        return self._assemble(arrays, self._overridden(layouts), pending.index_batch)

    def discard(self, pending: PendingBatch) -> None:
        """Wait for a batch that nobody wants any more, and take its slot back."""
        self.wait(pending)
        if pending.slot is not None:
            self._ring.give_back(pending.slot)
            pending.slot = None

    def _overridden(self, layouts: Dict[str, Layout]) -> Dict[str, Layout]:
        for name in self._layouts:
            if name not in layouts:
                raise ConfigError(
                    f"layouts.{name}: the samples have no such field; they have {list(layouts)}."
                    f"{nearest(name, layouts)}"
                )
        return {name: replace(layout, **self._layouts.get(name, {})) for name, layout in layouts.items()}

    def _assemble(self, arrays: Mapping[str, np.ndarray], layouts: Mapping[str, Layout], batch: IndexBatch) -> Instance:
        instance = Instance()
        for name, array in arrays.items():
            try:
                tensor = as_flow_tensor(array)
            except SchemaError as error:
                raise SchemaError(f"field '{name}': {error}") from error
            layout = layouts[name]
            instance.set(name, DistTensorData(tensor, list(layout.sbp_list), layout.placement_idx))
        instance._agreement = self._agreement
        instance._info = BatchInfo(batch.step, int(batch.epochs[0]), batch.position, batch.size, batch.valid)
        return instance
