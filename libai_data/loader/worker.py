"""A worker process: claims tasks from the queue, reads their samples into the arena, and reports to the trainer."""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from libai_data.data.fork_lock import end_if_fork_of
from libai_data.data.random.sample_random import become_worker_process
from libai_data.errors import DataPipelineError, SchemaError, error_text
from libai_data.launch.parent_pipe import die_with_parent
from libai_data.loader.arena import Arena
from libai_data.loader.executor import Collated, Payload, Task, TaskResult, TaskRunner, wants_to_end
from libai_data.loader.sample_form import SampleForm
from libai_data.loader.schema import SchemaMismatch, array_of, layout_of
from libai_data.loader.shipping import unship
from libai_data.loader.slots import Slot, SlotList, bytes_of, lay_out, views
from libai_data.loader.task_queue import Entry, WorkerTasks
from libai_data.loader.worker_info import WorkerInfo, set_worker_info
from libai_data.mesh.peers.channel import Channel
from libai_data.structures import DistTensorData

JOB_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "GLOG_log_dir")
"""Environment variables that make OneFlow treat a process as a rank of a job; a worker must never join a job."""


STDERR = 2
"""The descriptor of standard error, whatever `sys.stderr` is."""

_MOST_SLOTS_REMEMBERED = 64
_MS_BETWEEN_LOOKS = 200
"""How often an idle worker looks whether another process needs the room of the shards that it has open."""


@dataclass(frozen=True)
class WorkerHandles:
    """Descriptors that a worker inherits, and its number among the loader's workers."""

    number: int
    workers: int
    channel: int
    tasks: int
    done: int
    claims: int
    arena: int
    parent_pipe: int


@dataclass(frozen=True)
class RemoteFailure:
    """An exception of a worker, as sent to the trainer: `message` is one line, `trace` the original traceback."""

    message: str
    trace: str
    is_of_schema: bool = False


class SlotIndices:
    """The epochs and indices of batches, which are at the ends of their slots."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._known: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}

    def of(self, offset: int, size: int, batch_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Epochs and indices, int64 [batch_rows] each, of the batch in the slot at `offset`; `size` in bytes."""
        place = offset, size, batch_rows
        if place not in self._known:
            if len(self._known) >= _MOST_SLOTS_REMEMBERED:
                self._known.clear()
            words = self._arena.lease(offset, size)[size - 16 * batch_rows :].view(np.int64)
            self._known[place] = words[:batch_rows], words[batch_rows:]
        return self._known[place]


class _TrainerGone(BaseException):
    """The trainer's process has closed the channel, or is gone."""


def work(handles: WorkerHandles, payload: Payload) -> None:
    """Run tasks until the trainer's process closes the channel."""
    channel = Channel(socket.socket(fileno=handles.channel))
    arena = Arena(handles.arena)
    tasks = WorkerTasks(handles.number, handles.tasks, handles.done, handles.claims)
    runner = TaskRunner(payload, SlotList(arena))
    set_worker_info(WorkerInfo(handles.number, handles.workers, payload.seed, payload.dataset))
    try:
        if payload.init is not None:
            with suppress(OSError):
                channel.send(("init begins", None))
            process = os.getpid()
            try:
                payload.init(handles.number)
            finally:
                end_if_fork_of(process)
    except Exception as error:
        with suppress(OSError):
            channel.send(("init failed", remote_failure(error)))
        return
    with suppress(_TrainerGone, BrokenPipeError):
        _Worker(handles.number, channel, tasks, arena, runner, streamed_sources(payload.dataset)).run()
    # This shows the trainer that the process is about to end, so the trainer waits longer. Closing alone may not show
    # it, because a child process of the dataset may also have the channel open.
    channel.finish()
    channel.close()


def streamed_sources(dataset: Any) -> list[Any]:
    """The streamed sources of a dataset. Workers of other datasets start quickly, without the import."""
    if "libai_data.data.sources.streamed" not in sys.modules:
        return []
    from libai_data.data.datasets.streamed_shards import StreamedShards

    return StreamedShards(dataset).sources


class _Worker:
    def __init__(
        self,
        number: int,
        channel: Channel,
        tasks: WorkerTasks,
        arena: Arena,
        runner: TaskRunner,
        streamed: list[Any],
    ) -> None:
        self._channel = channel
        self._tasks = tasks
        self._arena = arena
        self._indices = SlotIndices(arena)
        self._runner = runner
        self._streamed = streamed
        self._events = select.poll()
        self._events.register(channel.fileno(), select.POLLIN)
        if number == 0:  # A task wakes this worker; the trainer need not.
            self._events.register(tasks.fileno(), select.POLLIN)

    def run(self) -> None:
        """Run tasks until the channel closes."""
        self._send(("ready", None))
        idle_since = time.perf_counter()
        while True:
            entry = self._tasks.take() or self._sleep()
            if entry is None:
                continue
            self._runner.reader.count_idle(time.perf_counter() - idle_since)
            # The trainer sends the schema before the tasks that need it, so the worker must receive it first.
            while self._runner.schema is None and self._channel.speaks():
                self._process_message()
            self._do(entry)
            idle_since = time.perf_counter()

    def _sleep(self) -> Entry | None:
        """Wait for a message, which may only wake this worker; returns a task that comes before the wait."""
        self._tasks.note_asleep(True)
        entry = self._tasks.take()
        if entry is None and self._channel.fileno() in {descriptor for descriptor, _ in self._wait()}:
            self._process_message()
        self._tasks.note_asleep(False)
        return entry

    def _wait(self) -> list[tuple[int, int]]:
        """Wait for events. Meanwhile, close shards whose room in the cache other processes need."""
        while not (events := self._events.poll(_MS_BETWEEN_LOOKS if self._streamed else None)):
            for source in self._streamed:
                source.close_if_asked()
        return events

    def _process_message(self) -> None:
        kind, content = self._receive()
        if kind == "schema":
            self._runner.schema = content

    def _send(self, message: Any) -> None:
        try:
            self._channel.send(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise _TrainerGone from error

    def _receive(self) -> Any:
        try:
            return self._channel.receive()
        except EOFError as error:
            raise _TrainerGone from error

    def _do(self, entry: Entry) -> None:
        """Run a task, and report the result to the trainer."""
        place, first_row, batch_rows = entry.place, entry.first_row, entry.batch_rows
        rows = slice(first_row, first_row + entry.rows)
        epochs, indices = self._indices.of(entry.offset, entry.size, batch_rows)
        slot, substitute_only = Slot(0, entry.offset, entry.size), bool(entry.substitute_only)
        task = Task(place, epochs[rows], indices[rows], first_row, batch_rows, slot, substitute_only, entry.position)
        try:
            result = self._runner.run(task)
        except BaseException as unusual:
            result = TaskResult(task.number, wants_to_end(task.indices.tolist(), unusual))
        if result.says_only_done:
            self._tasks.report(place, result.times)
            return
        error: Any = result.error
        if error is not None and not isinstance(error, SchemaMismatch):
            error = remote_failure(error)
        collated = None if result.collated is None else self._put_into_slot(entry, result.collated)
        first = None if result.first is None else _sendable(result.first)
        self._send(("done", result._replace(error=error, collated=collated, first=first)))

    def _put_into_slot(self, entry: Entry, made: Collated) -> Collated:
        """Copy a collated batch into its slot. If the batch is too large, it keeps its arrays, which are then sent."""
        arrays = made.arrays
        specs = lay_out((name, array.dtype, array.shape) for name, array in arrays.items())
        if bytes_of(specs) > entry.size:
            return made
        for name, target in views(self._arena.lease(entry.offset, entry.size), specs).items():
            target[...] = arrays[name]
        return replace(made, arrays={}, specs=specs)


def _sendable(sample: SampleForm) -> SampleForm:
    """A sample with its fields as plain arrays, because other values may be impossible to send."""
    fields = {}
    for name, value in sample.fields.items():
        layout = layout_of(value, name)
        fields[name] = DistTensorData(array_of(value, name).view(np.ndarray), layout.sbp_list, layout.placement_idx)
    return sample._replace(fields=fields)


def remote_failure(error: BaseException) -> RemoteFailure:
    """Describe an exception in a form that can be sent to the trainer."""
    message = str(error) if isinstance(error, DataPipelineError) else error_text(error)
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return RemoteFailure(message, trace, isinstance(error, SchemaError))


def prepare_process(parent_pipe: int) -> None:
    """Make a process a worker: it ends with its trainer, ignores Ctrl-C, prints stacks on SIGUSR1, and is no rank."""
    die_with_parent(parent_pipe)
    become_worker_process()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable(file=STDERR)
    faulthandler.register(signal.SIGUSR1, file=STDERR, all_threads=True)
    forget_job()


def forget_job() -> None:
    """Remove the launcher's variables, so that an import of OneFlow joins no job and waits for no rank."""
    for name in JOB_VARIABLES:
        os.environ.pop(name, None)


def _occupy_numbers(descriptors_of_trainer: str) -> None:
    """Occupy the trainer's descriptor numbers: a dataset that uses one gets an error, and no file of the worker."""
    nothing = os.open("/", os.O_PATH | os.O_CLOEXEC)  # stays open, because its number may be one of these
    for run in descriptors_of_trainer.split():
        first, _, last = run.partition("-")
        for number in range(int(first), int(last or first) + 1):
            try:
                os.fstat(number)
            except OSError:
                with suppress(OSError):  # The number is above the limit.
                    os.dup2(nothing, number, inheritable=False)


def main() -> None:
    """Entry point of a worker that is a separate program; its arguments have the handles and the payload."""
    handles, payload, sys.argv[:], descriptors_of_trainer = json.loads(sys.argv[1])
    _occupy_numbers(descriptors_of_trainer)  # before this process opens anything
    prepare_process(handles["parent_pipe"])
    channel = Channel(socket.socket(fileno=os.dup(handles["channel"])))
    try:
        unpacked = unship(payload)
        os.close(payload)
    except Exception as error:
        channel.send(("failed to start", remote_failure(error)))
        os._exit(1)
    channel.close()
    work(WorkerHandles(**handles), unpacked)
