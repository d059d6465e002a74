"""Executors: who does the reading. They differ in where, never in what: the tasks, rows and results are the same."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Deque, Dict, Optional, Protocol, Tuple

import numpy as np

from libai_data.loader.collate import Collator
from libai_data.loader.reading import SampleReader, collated_fields
from libai_data.loader.schema import SampleSchema
from libai_data.loader.slots import ArraySpec, Slot
from libai_data.structures import Fields


@dataclass(frozen=True)
class Task:
    """Some samples to read.

    Args:
        number: unique within a loader.
        epochs: int64 [n].
        indices: int64 [n].
        slot: the slot to read into, or None when a collator makes the whole batch.
        specs: the arrays of the slot.
        first_row: the batch's row of the first of these samples.
    """

    number: int
    epochs: np.ndarray
    indices: np.ndarray
    slot: Optional[Slot] = None
    specs: Tuple[ArraySpec, ...] = ()
    first_row: int = 0


@dataclass(frozen=True)
class TaskResult:
    """What became of a task: done, failed with `error`, or collated into `arrays` (with the fields they came from)."""

    number: int
    error: Optional[Exception] = None
    arrays: Dict[str, np.ndarray] = field(default_factory=dict)
    fields: Dict[str, Any] = field(default_factory=dict)


class Executor(Protocol):
    """Reads samples for a loader, here or elsewhere."""

    def first_sample(self, epoch: int, index: int) -> Fields:
        """Read the sample from which the schema is learned."""

    def use_schema(self, schema: SampleSchema) -> None:
        """Demand this schema of all samples from now on."""

    def submit(self, task: Task) -> None:
        """Put a task behind those that wait."""

    def next_result(self) -> TaskResult:
        """Wait until some submitted task is done."""

    def close(self) -> None:
        """End all that was started."""


class InProcessExecutor:
    """Reads in the caller's own thread, a task at a time, when its result is asked for.

    Args:
        reader: reads the samples.
        collator: makes a batch of a list of samples; None to read straight into slots.
    """

    def __init__(self, reader: SampleReader, collator: Optional[Collator]) -> None:
        self._reader = reader
        self._collator = collator
        self._schema: Optional[SampleSchema] = None
        self._waiting: Deque[Task] = deque()

    def first_sample(self, epoch: int, index: int) -> Fields:
        """Read the sample from which the schema is learned."""
        return self._reader.sample(epoch, index)

    def use_schema(self, schema: SampleSchema) -> None:
        """Demand this schema of all samples from now on."""
        self._schema = schema

    def submit(self, task: Task) -> None:
        """Put a task behind those that wait."""
        self._waiting.append(task)

    def next_result(self) -> TaskResult:
        """Do the task that has waited longest."""
        task = self._waiting.popleft()
        try:
            return run_task(task, self._reader, self._schema, self._collator)
        except Exception as error:  # every failure belongs to the batch, whose turn decides what to do about it
            return TaskResult(task.number, error)

    def close(self) -> None:
        """Forget the tasks that wait."""
        self._waiting.clear()


def run_task(
    task: Task, reader: SampleReader, schema: Optional[SampleSchema], collator: Optional[Collator]
) -> TaskResult:
    """Do a task: read its samples into its slot, or collate them.

    Raises:
        Exception: Whatever the dataset or the collator raises.
    """
    if collator is not None:
        arrays, fields = collated_fields(collator(reader.samples(task.epochs, task.indices)))
        return TaskResult(task.number, arrays=arrays, fields=fields)
    if task.slot is None or schema is None:
        raise RuntimeError("a task without a collator needs a slot and a schema")
    last_row = task.first_row + len(task.indices)
    rows = {name: array[task.first_row : last_row] for name, array in task.slot.arrays(task.specs).items()}
    reader.read_into(schema, rows, task.epochs, task.indices)
    return TaskResult(task.number)
