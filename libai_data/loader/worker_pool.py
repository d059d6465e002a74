"""The pool: starts a loader's worker processes, exchanges messages with them, and replaces and ends them."""

from __future__ import annotations

import logging
import select
import signal
import time
from contextlib import suppress
from typing import Any

from libai_data.data.fork_lock import ForkLock
from libai_data.launch.parent_pipe import ParentPipe, keep_from_forks
from libai_data.loader.arena import Arena
from libai_data.loader.starting import WorkerProcess, WorkerStarter
from libai_data.loader.task_queue import TaskQueue
from libai_data.loader.worker import WorkerHandles
from libai_data.mesh.peers.channel import Channel

logger = logging.getLogger(__name__)

_SECONDS_TO_BEGIN_EXIT = 1.0
"""How long `close` waits for a worker that is reading."""
_SECONDS_TO_EXIT = 5.0
"""How long `close` waits for exit handlers of a worker."""
_SECONDS_TO_DIE = 10.0


class WorkerPool:
    """The workers of one loader, by number."""

    def __init__(self, starter: WorkerStarter, count: int, task_queue: TaskQueue, arena: Arena) -> None:
        self._starter = starter
        self._task_queue = task_queue
        self._arena = arena
        self._changing = ForkLock()  # One thread may close the pool while another one replaces a worker.
        self._is_closed = False
        self._parent_pipe = ParentPipe()
        self._first_messages: list[Any] = []
        self._events = select.poll()
        self._events.register(task_queue.fileno(), select.POLLIN)
        self.processes: list[WorkerProcess] = []
        self.channels: list[Channel] = []
        try:
            for number in range(count):
                process, channel = self._start(number)
                self.processes.append(process)
                self.channels.append(channel)
        except BaseException:
            self.close()
            raise

    def _start(self, number: int) -> tuple[WorkerProcess, Channel]:
        ours, theirs = Channel.pair()
        keep_from_forks(ours)
        self._events.register(ours.fileno(), select.POLLIN)
        handles = WorkerHandles(
            number,
            self._task_queue.workers,
            theirs.fileno(),
            *self._task_queue.descriptors,
            self._arena.descriptor,
            self._parent_pipe.descriptor,
        )
        for message in self._first_messages:
            # Sent before the worker starts, because tasks may already wait for the worker.
            _send(ours, message)
        process = self._starter.start(handles)
        theirs.close()
        return process, ours

    def tell(self, number: int, message: Any) -> None:
        """Send a worker a message, unless the worker is gone; `hear` then finds the closed channel."""
        _send(self.channels[number], message)

    def tell_all(self, message: Any) -> None:
        """Send all workers a message, also workers that are started later."""
        self._first_messages.append(message)
        for channel in self.channels:
            _send(channel, message)

    def wait(self, seconds: float) -> list[int]:
        """Wait until a task is done, or until workers send or end; returns the numbers of these workers."""
        ready: set[int] = {descriptor for descriptor, _ in self._events.poll(seconds * 1000)}
        return [number for number, channel in enumerate(self.channels) if channel.fileno() in ready]

    def hear(self, number: int) -> Any:
        """Receive a message of a worker; None if the worker is gone."""
        try:
            return self.channels[number].receive()
        except EOFError:
            return None

    def replace(self, number: int) -> None:
        """Wait for a worker that ends, and start another one in its place, unless the pool is closed."""
        with self._changing:
            if self._is_closed:
                return
            self.processes[number].wait()
            self.processes[number].stderr.close()
            self._events.unregister(self.channels[number].fileno())
            self.channels[number].close()
            self.processes[number], self.channels[number] = self._start(number)

    def close_trainer_ends(self) -> None:
        """Close the trainer's ends of channels and pipe; the workers end when no process has these ends open."""
        for channel in self.channels:
            channel.close()
        self._parent_pipe.close_parents_end()

    def close(self) -> None:
        """Let all workers exit, and kill workers that do not exit in time."""
        with self._changing:
            self._is_closed = True
            try:
                self._let_exit()
            finally:
                self._end()

    def _end(self) -> None:
        for process in self.processes:
            process.send(signal.SIGKILL)
        self.close_trainer_ends()
        deadline = time.monotonic() + _SECONDS_TO_DIE
        for process in self.processes:
            how = process.wait(deadline)
            if not process.has_ended():
                logger.error("Process %d, a worker that the loader closes, %s.", process.pid, how)
            process.stderr.close()
        self.processes.clear()
        self._parent_pipe.close()
        self._starter.close()

    def _let_exit(self) -> None:
        """Wait until workers have exited; the wait is shorter for workers that are still reading."""
        for channel in self.channels:
            channel.finish()
        began, running = time.monotonic(), list(zip(self.processes, self.channels))
        while running:
            seconds = time.monotonic() - began
            running = [
                (process, channel)
                for process, channel in running
                if not process.has_ended()
                and seconds < (_SECONDS_TO_EXIT if channel.is_closed_there() else _SECONDS_TO_BEGIN_EXIT)
            ]
            time.sleep(0.001 if running else 0)


def _send(channel: Channel, message: Any) -> None:
    with suppress(OSError):
        channel.send(message)
