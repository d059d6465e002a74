"""Reading in worker processes: submits tasks to the task queue, collects results, retries tasks of dead workers."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import deque
from dataclasses import replace

from libai_data.errors import DataPipelineError, SampleError, SchemaError, indices_in_words
from libai_data.loader.arena import Arena
from libai_data.loader.executor import Executor, Stuck, Task, TaskResult
from libai_data.loader.retry import Retry
from libai_data.loader.schema import SampleSchema
from libai_data.loader.starting import WorkerStarter
from libai_data.loader.task_queue import Entry, TaskQueue
from libai_data.loader.worker import RemoteFailure, SlotIndices, streamed_sources
from libai_data.loader.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

_DEATHS_ALLOWED_WITHOUT_TASK = 3
"""How often each worker may die, on average, before any worker has finished a task."""

_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_TO_PRINT_STACKS = 0.3
_SECONDS_TO_START = 60.0
"""How long a worker may take to start, in addition to the timeout."""
_STARTS, _INITIALIZES = "opening its copy", "calling worker_init_fn"
_SECONDS_WORTH_WAKING = 0.00035
"""Seconds of waiting work for which waking another worker pays off."""
_SECONDS_BEFORE_HELP = 0.002
"""How long the trainer waits for the workers that are awake, before it wakes the others."""
_LEAST_SECONDS = 1e-6


class ProcessExecutor(Executor):
    """Reads in worker processes, which write into the arena.

    Args:
        timeout: seconds after which a worker that is busy with one task counts as hung; 0 waits forever.
    """

    collates_into_slots = True

    def __init__(self, starter: WorkerStarter, workers: int, arena: Arena, timeout: float) -> None:
        self._pid = os.getpid()
        self._starter = starter
        self._dataset_name = starter.dataset_name
        self._indices = SlotIndices(arena)
        self._timeout = timeout
        self._streamed = streamed_sources(starter.payload.dataset)
        self._tasks: dict[int, Task] = {}
        self._retry = Retry(starter.payload)
        self._deaths_without_task = 0
        self._may_wait = 0
        self._ready: deque[TaskResult] = deque()
        self._fatal: SampleError | None = None
        self._beginning = dict.fromkeys(range(workers), _STARTS)
        self._has_unpickled = False
        self._last_check = time.monotonic()
        self._stuck = Stuck(workers)
        self._is_closed = False
        self._task_queue = TaskQueue(workers)
        try:
            self._pool = WorkerPool(starter, workers, self._task_queue, arena)
        except BaseException:
            self._task_queue.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [process.pid for process in self._pool.processes]

    def use_schema(self, schema: SampleSchema) -> None:
        if schema.has_text:
            self._retry.keep_whole()
        # Workers only need to know whether samples are nested; perhaps they cannot import the class of a named tuple.
        sent = schema if schema.skeleton is None else replace(schema, skeleton={})
        self._pool.tell_all(("schema", sent))

    def submit(self, task: Task) -> None:
        slot = task.slot
        if slot is None:
            raise RuntimeError("worker processes read into slots; the task has none")
        self._check_open()
        count = len(task.indices)
        epochs, indices = self._indices.of(slot.offset, slot.size, task.batch_rows)
        rows = slice(task.first_row, task.first_row + count)
        epochs[rows], indices[rows] = task.epochs, task.indices
        entry = Entry(
            slot.offset, slot.size, task.first_row, count, task.batch_rows, int(task.substitute_only), task.position
        )
        self._tasks[self._task_queue.put(entry)] = task
        self._wake(self._task_queue.to_wake(self._may_wait))

    def _wake(self, workers: list[int]) -> None:
        for number in workers:
            self._pool.tell(number, ("wake", None))

    def next_result(self) -> TaskResult:
        """Wait until some task is done; returns its result."""
        while not self._ready:
            self._receive_or_check()
        return self._ready.popleft()

    def has_result(self) -> bool:
        if not self._ready:
            self._listen(0)
        return bool(self._ready)

    def _receive_or_check(self) -> None:
        """Wait about a second for results or messages; each second, look for workers that died or hang."""
        if self._fatal is not None:
            raise self._fatal
        self._check_open()
        self._collect()
        if not self._ready and not self._listen(_SECONDS_BEFORE_HELP) and not self._ready:
            self._wake(self._task_queue.all_to_wake())
            for source in self._streamed:  # A worker may need the room of shards that this process has open.
                source.close_if_asked()
            self._listen(_SECONDS_BETWEEN_LOOKS)
        if time.monotonic() - self._last_check > _SECONDS_BETWEEN_LOOKS:
            self._check_workers()
            self._last_check = time.monotonic()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the loader has been closed, or the program ends, while a batch is being read")

    def _collect(self) -> None:
        """Collect the tasks that are done from the task queue."""
        for place, times in self._task_queue.take_done():
            task = self._tasks.pop(place)
            self._finish(task, TaskResult(task.number, times=times))

    def _listen(self, seconds: float) -> bool:
        """Receive one message of each worker that sends within `seconds`; returns whether any worker did."""
        senders = self._pool.wait(seconds)
        for number in senders:
            self._receive(number)
        self._collect()
        return bool(senders)

    def _receive(self, number: int, hung: str = "") -> None:
        message = self._pool.hear(number)
        if message is None:
            self._replace(number, hung)
            return
        kind, content = message
        if kind == "done":
            if isinstance(content.error, RemoteFailure):
                content = content._replace(error=self._sample_error(content.error, number))
            task = self._tasks.pop(content.number)
            self._finish(task, content._replace(number=task.number))
        elif kind == "ready":
            self._has_unpickled |= self._pool.processes[number].is_program
            del self._beginning[number]
        elif kind == "init begins":
            self._beginning[number] = _INITIALIZES
        elif kind == "init failed":
            raise SampleError(f"worker_init_fn: {self._with_traceback(content, number)}")
        elif self._starter.fork_instead(f"{self._dataset_name} cannot be unpickled in a worker: {content.message}"):
            self._restart(number)
        else:
            raise self._sample_error(content, number)

    def _finish(self, task: Task, result: TaskResult) -> None:
        self._deaths_without_task = 0
        self._may_wait = int(_SECONDS_WORTH_WAKING / max(result.times.busy, _LEAST_SECONDS))
        self._add_result(task, result)

    def _add_result(self, task: Task, result: TaskResult) -> None:
        whole = self._retry.result_of(task, result)
        if whole is not None:
            self._ready.append(whole)

    def _sample_error(self, failure: RemoteFailure, number: int) -> DataPipelineError:
        return (SchemaError if failure.is_of_schema else SampleError)(self._with_traceback(failure, number))

    def _with_traceback(self, failure: RemoteFailure, number: int) -> str:
        whose = f"worker {number} (process {self._pool.processes[number].pid})"
        return f"{failure.message}\n\nTraceback of {whose}:\n{failure.trace}"

    def _replace(self, number: int, hung: str = "") -> None:
        """Replace a worker that died, or that the trainer ended because it `hung`; submit its unfinished task again."""
        self._check_open()
        process = self._pool.processes[number]
        pid = process.pid
        ended, last_output = process.wait(), process.stderr.last_output()
        if not process.has_ended():
            # The system may still write into the batch for this worker, so no other worker can read the same rows.
            self._fatal = SampleError(f"worker {number} (process {pid}) of {self._dataset_name} {ended}")
            raise self._fatal
        how = hung or ended
        if (
            process.is_program
            and not self._has_unpickled
            and self._starter.fork_instead(f"a worker that unpickled {self._dataset_name} {how}{last_output}")
        ):
            self._restart(number)
            return
        # Tasks that it had finished are not retried.
        self._collect()
        place = self._task_queue.claim(number)
        self._task_queue.clear_claim(number)
        task = None if place is None else self._tasks.pop(place, None)
        if task is None:
            self._deaths_without_task += 1
            if self._deaths_without_task > _DEATHS_ALLOWED_WITHOUT_TASK * len(self._pool.processes):
                who = f"worker {number} (process {pid})"
                self._fatal = SampleError(f"{who} {how}, again and again, before it read{last_output}")
                raise self._fatal
            lost = "it had no task"
        else:
            lost = f"samples {indices_in_words(task.indices)} are read again"
        logger.warning("Worker %d (process %d) %s; it is replaced, and %s%s.", number, pid, how, lost, last_output)
        self._restart(number)
        if task is not None:
            self._retry_task(task, f"worker {number}, which {how}{last_output}", bool(hung))
        # The dead worker may have been woken for a task that it did not claim.
        self._wake(self._task_queue.all_to_wake())

    def _restart(self, number: int) -> None:
        self._pool.replace(number)
        self._check_open()
        self._beginning[number] = _STARTS

    def _retry_task(self, task: Task, who: str, hung: bool) -> None:
        try:
            again = self._retry.after_death(task, who, hung)
        except SampleError as error:
            self._add_result(task, TaskResult(task.number, error))
            return
        for part in again:
            self.submit(part)

    def _check_workers(self) -> None:
        """Replace workers that have ended without a message, and end workers that hang."""
        while self._listen(0):  # Receive all messages first: whether a worker hangs depends on its last message.
            pass
        self._stuck.look()
        for number, process in enumerate(list(self._pool.processes)):
            process.stderr.pass_on()
            if process.has_ended():
                self._receive_rest(number)
            elif self._timeout and process is self._pool.processes[number]:
                self._check_worker(number)

    def _check_worker(self, number: int) -> None:
        what, place = self._beginning.get(number), self._task_queue.claim(number)
        if what is None and place in self._tasks:
            what = f"reading samples {indices_in_words(self._tasks[place].indices)}"
        elif what is None and self._task_queue.waiting() and number not in self._task_queue.sleepers():
            # It should read one of them.
            what = "leaving samples waiting"
        seconds = self._stuck.seconds(number, what and (what, place))
        if seconds > self._timeout + (_SECONDS_TO_START if what == _STARTS else 0):
            self._end_hung(number, str(what), seconds)

    def _end_hung(self, number: int, what: str, seconds: float) -> None:
        """Let a worker that takes too long print its stacks, and kill the worker, or end the run."""
        process, limit = self._pool.processes[number], f"timeout {self._timeout:g} s"
        process.send(signal.SIGUSR1)
        time.sleep(_SECONDS_TO_PRINT_STACKS)
        if what == _INITIALIZES:  # It would also do so in a new worker.
            process.stderr.pass_on()
            self._fatal = SampleError(
                f"worker_init_fn has not returned in worker {number} (process {process.pid}) for {seconds:.0f} s "
                f"({limit}): see its stacks above, or raise timeout"
            )
            raise self._fatal
        logger.error(
            f"Worker {number} (process {process.pid}) has been {what} of {self._dataset_name} for {seconds:.0f} s "
            f"({limit}): its stacks follow, and it is ended."
        )
        process.send(signal.SIGKILL)
        process.wait()
        fork = "" if process.is_program else "; a fork lacks the threads that the dataset started before"
        self._receive_rest(number, f"was ended after {seconds:.0f} s ({limit}){fork}")

    def _receive_rest(self, number: int, hung: str = "") -> None:
        """Receive what a worker sent before it ended, and replace it, even if a child of it keeps the channel open."""
        process = self._pool.processes[number]
        while process is self._pool.processes[number]:
            if not self._pool.channels[number].speaks():
                self._replace(number, hung)
            else:
                self._receive(number, hung)

    def cancel(self) -> list[TaskResult]:
        self._check_open()
        for place in self._task_queue.drop_waiting():
            task = self._tasks.pop(place)
            self._add_result(task, TaskResult(task.number))
        dropped = list(self._ready)
        self._ready.clear()
        return dropped

    def close(self) -> None:
        """Let all workers exit, and kill workers that do not exit in time."""
        # Another thread may wait for a result; it must not replace workers that exit.
        self._is_closed = True
        if os.getpid() == self._pid:  # A fork of the trainer has no workers.
            self._task_queue.drop_waiting()
        self._pool.close()
        self._task_queue.close()
