"""Worker processes as seen by the trainer: started, given tasks, listened to, replaced when they die, ended."""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import time
import weakref
from collections import deque
from contextlib import suppress
from typing import Any, Deque, Dict, List, Optional, Tuple

from libai_data.errors import SampleError
from libai_data.loader.arena import Arena
from libai_data.loader.board import Board, Entry
from libai_data.loader.channel import Channel
from libai_data.loader.executor import Task, TaskResult, unpack_plain
from libai_data.loader.lifeline import Lifeline
from libai_data.loader.schema import SampleSchema
from libai_data.loader.starting import WorkerProcess, WorkerStarter
from libai_data.loader.worker import Equipment, RemoteFailure, indices_of
from libai_data.structures import Fields

logger = logging.getLogger(__name__)

DEATHS_ALLOWED = 3
"""How often a worker may die over the same samples before the run ends."""

_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_TO_PRINT_STACKS = 0.3
_SECONDS_TO_START = 60.0

_executors: weakref.WeakSet[ProcessExecutor] = weakref.WeakSet()


def _let_go_in_forked_child() -> None:
    for executor in list(_executors):
        executor.close_trainer_ends()


# Any process forked from the trainer inherits the trainer's ends; while it held them, the workers could not see them
# close.
os.register_at_fork(after_in_child=_let_go_in_forked_child)


class ProcessExecutor:
    """Reads in worker processes, which write into the arena.

    Args:
        starter: starts workers of one loader.
        workers: number of processes.
        arena: where the slots lie.
        timeout: seconds after which a worker that is busy with one task counts as hung; 0 waits for ever.
    """

    collates_into_slots = True

    def __init__(self, starter: WorkerStarter, workers: int, arena: Arena, timeout: float) -> None:
        self._starter = starter
        self._arena = arena
        self._timeout = timeout
        self._board = Board(workers)
        self._lifeline = Lifeline()
        self._schema: Optional[SampleSchema] = None
        self._tasks: Dict[int, Task] = {}
        self._place_of: Dict[int, int] = {}
        self._deaths: Dict[int, int] = {}
        self._deaths_without_task = 0
        self._ready: Deque[TaskResult] = deque()
        self._first_sample: Deque[Any] = deque()
        self._fatal: Optional[SampleError] = None
        self._submitted: Dict[Optional[int], float] = {}
        self._heard: List[float] = []
        self._processes: List[WorkerProcess] = []
        self._channels: List[Channel] = []
        self._events = select.poll()
        self._last_look = time.monotonic()
        _executors.add(self)
        try:
            for number in range(workers):
                process, channel = self._start(number)
                self._processes.append(process)
                self._channels.append(channel)
                self._heard.append(_start_is_due())
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> List[int]:
        """Process ids of the workers."""
        return [process.pid for process in self._processes]

    def _start(self, number: int) -> Tuple[WorkerProcess, Channel]:
        ours, theirs = Channel.pair()
        self._events.register(ours.fileno(), select.POLLIN)
        memory, pipe = self._board.descriptors
        equipment = Equipment(
            number,
            self._board.workers,
            theirs.fileno(),
            memory,
            pipe,
            self._arena.descriptor,
            self._lifeline.descriptor,
        )
        if self._schema is not None:
            # It must lie ready: tasks wait for the worker from its first moment on.
            _send(ours, ("schema", self._schema))
        # A forked worker closes this process's ends; the newest is not listed yet.
        process = self._starter.start(equipment, close_in_child=ours)
        theirs.close()
        return process, ours

    def first_sample(self, epoch: int, index: int) -> Fields:
        """Let the first worker read the sample from which the schema is learned.

        Raises:
            SampleError: It failed, or its worker died or hung over it.
            RuntimeError: The executor has been closed.
        """
        self._check_open()
        for _ in range(DEATHS_ALLOWED):
            asked, process = time.monotonic(), self._processes[0]
            _send(self._channels[0], ("first sample", (epoch, index)))
            while not self._first_sample and process is self._processes[0]:
                self._hear_or_look()
                seconds = time.monotonic() - max(asked, self._heard[0])
                if self._timeout and seconds > self._timeout and process is self._processes[0]:
                    self._end_hung(0, f"sample {index}", seconds)
            if self._first_sample:
                answer = self._first_sample.popleft()
                if isinstance(answer, RemoteFailure):
                    raise self._sample_error(answer, 0)
                return answer
        raise SampleError(f"worker 0 died {DEATHS_ALLOWED} times over sample {index}, the first of the stream")

    def use_schema(self, schema: SampleSchema) -> None:
        """Demand this schema of all samples from now on."""
        self._schema = schema
        for channel in self._channels:
            _send(channel, ("schema", schema))

    def submit(self, task: Task) -> None:
        """Put a task on the board."""
        slot = task.slot
        if slot is None:
            raise RuntimeError("worker processes read into slots; the task has none")
        rows = slice(task.first_row, task.first_row + len(task.indices))
        epochs, indices = indices_of(self._arena.lease(slot.offset, slot.size), task.batch_rows)
        epochs[rows], indices[rows] = task.epochs, task.indices
        entry = Entry(task.number, slot.offset, slot.size, task.first_row, len(task.indices), task.batch_rows)
        place = self._board.put(entry)
        self._tasks[place] = task
        self._submitted[place] = time.monotonic()
        self._place_of[task.number] = place

    def next_result(self) -> TaskResult:
        """Wait until some task is done.

        Raises:
            SampleError: Workers die before they can do anything.
            RuntimeError: The executor has been closed, so that nothing is done any more.
        """
        while not self._ready:
            self._hear_or_look()
        return self._ready.popleft()

    def _hear_or_look(self) -> None:
        """Wait for messages for a moment; now and then, look for workers that cannot send any more."""
        if self._fatal is not None:
            raise self._fatal
        self._check_open()
        self._listen(_SECONDS_BETWEEN_LOOKS)
        if time.monotonic() - self._last_look > _SECONDS_BETWEEN_LOOKS:
            self._look_after_workers()
            self._last_look = time.monotonic()

    def _check_open(self) -> None:
        if not self._processes:
            raise RuntimeError("the loader has been closed while its batches were being taken")

    def has_result(self) -> bool:
        """Whether some task is done."""
        if not self._ready:
            self._listen(0)
        return bool(self._ready)

    def _listen(self, seconds: float) -> bool:
        """Hear one message of each worker that sends within this time; returns whether any did."""
        ready = {descriptor for descriptor, _ in self._events.poll(seconds * 1000)}
        for number, channel in enumerate(self._channels):
            if channel.fileno() in ready:
                self._hear(number, channel)
        return bool(ready)

    def _hear(self, number: int, channel: Channel, hung: str = "") -> None:
        message = _receive(channel)
        if message is None:
            self._replace(number, hung)
            return
        self._heard[number] = time.monotonic()
        if type(message) is bytes:
            self._finish(number, unpack_plain(message))
            return
        kind, content = message
        if kind == "ready":
            return
        if kind == "done":
            self._finish(number, content)
        elif kind == "room":
            _send(channel, ("room", self._arena.allocate(content + content // 4)))
        elif kind == "first sample":
            self._first_sample.append(content)
        else:
            raise self._sample_error(content, number)

    def _finish(self, number: int, result: TaskResult) -> None:
        self._deaths_without_task = 0
        place = self._place_of.pop(result.number)
        del self._tasks[place], self._submitted[place]
        self._deaths.pop(result.number, None)
        if isinstance(result.error, RemoteFailure):
            error = self._sample_error(result.error, number)
            result = TaskResult(result.number, error, None, result.times, result.skipped)
        self._ready.append(result)

    def _sample_error(self, failure: RemoteFailure, number: int) -> SampleError:
        whose = f"worker {number} (process {self._processes[number].pid})"
        return SampleError(f"{failure.message}\n\nTraceback of {whose}:\n{failure.trace}")

    def _replace(self, number: int, hung: str = "") -> None:
        """Start a worker anew after its death, and have the task that it was at done again.

        Args:
            number: the worker's.
            hung: why it was ended, if it was ended from here.
        """
        process = self._processes[number]
        ended = process.wait()
        how = hung or ended
        self._events.unregister(self._channels[number].fileno())
        self._channels[number].close()
        place, _ = self._board.claim(number)
        self._board.clear_claim(number)
        task = None if place is None or self._board.is_waiting(place) else self._tasks.pop(place, None)
        if task is None:
            self._deaths_without_task += 1
            if self._deaths_without_task > DEATHS_ALLOWED * len(self._processes):
                whose = f"worker {number} (process {process.pid})"
                self._fatal = SampleError(f"{whose} {how}, again and again, before it read")
                raise self._fatal
            lost = "it had no task"
        else:
            del self._submitted[place]
            lost = f"samples {task.indices.tolist()} are read again"
        logger.warning("Worker %d (process %d) %s; it is replaced, and %s.", number, process.pid, how, lost)
        self._processes[number], self._channels[number] = self._start(number)
        self._heard[number] = _start_is_due()
        if task is not None:
            self._redo(number, task, how)
        # The dead worker may have taken a call to look from the pipe and not have followed it.
        self._board.wake()

    def _redo(self, number: int, task: Task, how: str) -> None:
        del self._place_of[task.number]
        self._deaths[task.number] = self._deaths.get(task.number, 0) + 1
        if self._deaths[task.number] < DEATHS_ALLOWED:
            self.submit(task)
            return
        error = SampleError(
            f"{DEATHS_ALLOWED} workers ended over samples {task.indices.tolist()} of {self._starter.dataset_name}; "
            f"the last one, worker {number}, {how}. If memory is short, use fewer workers or a lower prefetch"
        )
        self._ready.append(TaskResult(task.number, error))

    def _look_after_workers(self) -> None:
        """Replace workers that have ended without a word, and end those that hang."""
        while self._listen(0):  # Before they are judged by what they have not said, all that they have is heard.
            pass
        for number, process in enumerate(list(self._processes)):
            if process.has_ended():
                self._hear_last_words(number)
            elif self._timeout and process is self._processes[number]:
                self._look_at(number)

    def _look_at(self, number: int) -> None:
        place, seconds = self._board.claim(number)
        if place in self._tasks:
            what = f"reading samples {self._tasks[place].indices.tolist()}"
        else:
            # It is idle, which is wrong only while a task waits.
            what = "leaving samples waiting"
            waiting_since = self._submitted.get(self._board.oldest_waiting(), math.inf)
            seconds = time.monotonic() - max(self._heard[number], waiting_since)
        if seconds > self._timeout:
            self._end_hung(number, what, seconds)

    def _end_hung(self, number: int, what: str, seconds: float) -> None:
        """Kill a worker that takes too long, after it has printed its stacks."""
        process = self._processes[number]
        logger.error(
            "Worker %d (process %d) has been %s of %s for %.0f s (timeout %g s): its stacks follow, and it is ended.",
            number,
            process.pid,
            what,
            self._starter.dataset_name,
            seconds,
            self._timeout,
        )
        process.send(signal.SIGUSR1)
        time.sleep(_SECONDS_TO_PRINT_STACKS)
        process.send(signal.SIGKILL)
        process.wait()
        self._hear_last_words(number, f"was ended after {seconds:.0f} s (timeout {self._timeout:g} s)")

    def _hear_last_words(self, number: int, hung: str = "") -> None:
        """Hear what a worker sent before it ended, and replace it, even if a child of its own holds its channel."""
        process = self._processes[number]
        while process is self._processes[number]:
            channel = self._channels[number]
            if not channel.speaks():
                self._replace(number, hung)
            else:
                self._hear(number, channel, hung)

    def close_trainer_ends(self) -> None:
        """Close what only the trainer may hold; the workers end when nobody holds it any more."""
        for channel in self._channels:
            channel.close()
        self._board.close_writing_end()
        self._lifeline.let_go()

    def close(self) -> None:
        """End all workers, at once."""
        _executors.discard(self)
        for process in self._processes:
            process.send(signal.SIGKILL)
        self.close_trainer_ends()
        for process in self._processes:
            process.wait()
        self._processes.clear()
        self._board.close()
        self._lifeline.close()
        self._starter.close()


def _start_is_due() -> float:
    """When a worker that starts now must have been heard."""
    return time.monotonic() + _SECONDS_TO_START


def _receive(channel: Channel) -> Any:
    """What a worker says; None if it is gone."""
    try:
        return channel.receive()
    except EOFError:
        return None


def _send(channel: Channel, message: Any) -> None:
    """Send, unless the worker is gone; its closed channel is heard soon enough."""
    with suppress(OSError):
        channel.send(message)
