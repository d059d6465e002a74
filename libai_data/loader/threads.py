"""Worker threads: for decoders that release the GIL, and datasets that cannot be sent to other processes."""

from __future__ import annotations

import queue
import time
from collections import deque
from contextlib import suppress
from typing import Callable

from libai_data.data.random.global_generators import (
    HOW_TO_DRAW,
    callers_of_a_reader,
    share_generators,
    take_has_drawn,
    warn_once,
)
from libai_data.errors import SampleError, indices_in_words
from libai_data.loader.daemon_thread import DaemonThread
from libai_data.loader.executor import Executor, Stuck, Task, TaskResult, TaskRunner, wants_to_end
from libai_data.loader.schema import SampleSchema

_SECONDS_BETWEEN_LOOKS = 1.0
_MOST_REREADS = 16


class ThreadExecutor(Executor):
    """Reads in threads of the trainer's own process; they share the dataset, so it must be thread-safe.

    Threads share the global random generators. If one moves while a thread reads, the caller's thread reads the samples
    again, while the others rest. If the samples draw from it, the caller's thread reads the rest of the stream, too.

    Args:
        timeout: seconds after which a task that is not done raises an error; 0 waits forever.
    """

    def __init__(self, make_runner: Callable[[], TaskRunner], workers: int, timeout: float) -> None:
        self._runners = [make_runner() for _ in range(workers)]
        self._name = type(self._runners[0].reader.dataset).__name__
        self._timeout = timeout
        self._stuck = Stuck(workers)
        self._closed = False
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Task, TaskResult, bool] | None] = queue.SimpleQueue()
        self._unfinished = 0
        self._callers: frozenset[int] = frozenset()
        self._done: deque[TaskResult] = deque()
        self._caller_tasks: deque[Task] = deque()
        self._rereads_left = _MOST_REREADS
        self._working: list[Task | None] = [None] * workers
        self._threads: list[DaemonThread] = []

    def _work(self, number: int) -> None:
        runner = self._runners[number]
        while not self._closed:
            idle_since = time.perf_counter()
            task = self._tasks.get()
            if task is None:
                return
            self._working[number] = task
            runner.reader.count_idle(time.perf_counter() - idle_since)
            # While the first sample is read, the caller waits, or is about to, and so do the other threads.
            is_alone = runner.reads_first_sample
            try:
                share_generators(not is_alone, self._callers)
                result = runner.run(task)
            except BaseException as error:
                result = TaskResult(task.number, wants_to_end(task.indices.tolist(), error))
            self._results.put((task, result, take_has_drawn() and not is_alone))
            self._working[number] = None
            # A thread that waits must keep no batch alive.
            del task, result

    def use_schema(self, schema: SampleSchema) -> None:
        for runner in self._runners:
            runner.schema = schema

    def submit(self, task: Task) -> None:
        if self._needs_one_thread:
            self._caller_tasks.append(task)
            return
        if not self._threads:
            self._start_threads()
        self._unfinished += 1
        self._callers = callers_of_a_reader()
        self._tasks.put(task)

    def _start_threads(self) -> None:
        # Not in `__init__`: a Ctrl-C could lose this executor before anybody can close it, and so end its threads.
        for number in range(len(self._runners)):
            self._threads.append(DaemonThread(self._work, (number,), f"libai_data worker {number}"))
            self._threads[-1].start()

    def next_result(self) -> TaskResult:
        """Wait until some task is done; returns its result."""
        while not self._done:
            if self._caller_tasks and not self._unfinished:
                return self._run(self._caller_tasks.popleft())
            task, result, has_drawn = self._wait_for_thread()
            self._unfinished -= 1
            if has_drawn and self._rereads_left:
                self._caller_tasks.append(task)
            else:
                self._done.append(result)
                if not self._caller_tasks:
                    break
        return self._done.popleft()

    def _run(self, task: Task) -> TaskResult:
        """Run a task in the caller's thread, and find out whether its samples draw from global generators."""
        result = self._runners[0].run(task)
        if self._needs_one_thread:
            warn_once(
                "%s is read in the trainer's own thread, as it draws from random generators that all threads share. "
                "Use worker_type='process'; or %s",
                self._name,
                HOW_TO_DRAW,
            )
        else:
            self._rereads_left -= 1
            if not self._rereads_left:
                warn_once(
                    "Other code of this process draws from global random generators while threads read %s. The loader "
                    "can no longer detect whether its samples draw from them, too; if they do, use "
                    "worker_type='process', or %s",
                    self._name,
                    HOW_TO_DRAW,
                )
        return result

    @property
    def _needs_one_thread(self) -> bool:
        return any(
            runner.reader.draws.needs_one_thread or runner.batch_draws.needs_one_thread for runner in self._runners
        )

    def _wait_for_thread(self) -> tuple[Task, TaskResult, bool]:
        while not self._closed:
            with suppress(queue.Empty):
                found = self._results.get(timeout=_SECONDS_BETWEEN_LOOKS)
                if found is not None:
                    return found
            if self._timeout:
                self._check_timeout()
        raise RuntimeError("the loader has been closed, or the program ends, while a batch is being read")

    def has_result(self) -> bool:
        return bool(self._done) or not self._results.empty()

    def _check_timeout(self) -> None:
        self._stuck.look()
        for number, task in enumerate(list(self._working)):
            if task is not None and self._stuck.seconds(number, task.number) > self._timeout:
                raise SampleError(
                    f"worker thread {number} has been reading samples {indices_in_words(task.indices)} for more than "
                    f"{self._timeout} s; raise timeout if that is normal"
                )

    def cancel(self) -> list[TaskResult]:
        dropped: list[TaskResult] = []
        with suppress(queue.Empty):
            while True:
                task = self._tasks.get_nowait()
                if task is not None:
                    self._unfinished -= 1
                    dropped.append(TaskResult(task.number))
        dropped += [TaskResult(task.number) for task in self._caller_tasks]
        self._caller_tasks.clear()
        return dropped

    def close(self) -> None:
        """Let the threads end after their current tasks; waiting tasks are dropped."""
        self.cancel()
        self._closed = True
        for _ in self._threads:
            self._tasks.put(None)
        # Wakes another thread that waits for a result.
        self._results.put(None)
