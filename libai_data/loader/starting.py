"""Starts worker processes: as separate programs if the dataset can be sent to them, otherwise as forks."""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import logging
import multiprocessing.process
import multiprocessing.util
import os
import queue
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import traceback
import weakref
from concurrent.futures import thread as thread_pools
from contextlib import suppress
from dataclasses import asdict
from typing import Callable, NoReturn

from libai_data.data.random.kept_objects import random_hashes_of, warn_of_random_hashes
from libai_data.errors import ConfigError, error_text, numbers_in_words
from libai_data.launch.parent_pipe import OwnDescriptors
from libai_data.launch.same_interpreter import arguments, environment, import_paths, interpreter
from libai_data.launch.signals import signals_blocked
from libai_data.loader.executor import Payload
from libai_data.loader.shipping import Shipment, ship
from libai_data.loader.worker import JOB_VARIABLES, STDERR, WorkerHandles, prepare_process, work

logger = logging.getLogger(__name__)

START_METHODS = ("auto", "spawn", "fork")

_BOOT = "import sys, json; sys.path[:] = json.loads(sys.argv[2]); from libai_data.loader.worker import main; main()"
_SECONDS_TO_END = 10.0
_TAIL_BYTES, _MOST_STDERR_BYTES = 40_000, 1 << 20
_PICKLED_BYTES_WORTH_A_FORK = 4 * 2**20
_BYTES_OF_OBJECTS_PER_PICKLED_BYTE = 10
_THREADS_OF_LIBRARIES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class _TooManyObjects(Exception):
    pass


class WorkerStarter:
    """Starts the workers of one loader.

    A separate program has no threads of the trainer, and no OneFlow unless the dataset imports it; the dataset must be
    picklable. A fork shares the dataset as it is, with its open files, but must not use OneFlow.

    Args:
        start_method: "spawn", "fork", or "auto": spawn if the dataset can be pickled here and unpickled in the worker,
            has few Python objects, because each program copies them, and uses no hashes that another program has not;
            otherwise fork.
    """

    def __init__(self, payload: Payload, start_method: str) -> None:
        self.dataset_name = type(payload.dataset).__name__
        self.payload = payload
        self._method = start_method
        self._shipment: Shipment | None = None
        self._has_logged = False
        if start_method != "fork":
            self._ship()

    def _ship(self) -> None:
        hashes = random_hashes_of(self.payload.dataset) or random_hashes_of(self.payload.collator)
        if hashes and self.fork_instead(
            f"{self.dataset_name} may use hashes of texts ({hashes}), and only forks have the hash seed of this process"
        ):
            return
        try:
            interpreter()  # raises without a program to start
            self._shipment = ship(self.payload, self._check_size)
        except _TooManyObjects as many:
            self.fork_instead(f"{self.dataset_name} has {many}, again for each worker")
        except Exception as error:
            reason = f"{self.dataset_name} cannot be sent to a worker process: {error_text(error)}"
            if not self.fork_instead(reason):
                raise ConfigError(
                    f"{reason}. Open files, connections and locks in the first __getitem__ instead of __init__, or use "
                    "start_method='fork', worker_type='thread' or num_workers=0"
                ) from error
        warn_of_random_hashes(self.dataset_name, hashes)

    def _check_size(self, pickled_bytes: int) -> None:
        if self._method == "auto" and pickled_bytes > _PICKLED_BYTES_WORTH_A_FORK:
            megabytes = pickled_bytes * _BYTES_OF_OBJECTS_PER_PICKLED_BYTE / 1e6
            raise _TooManyObjects(f"Python objects of about {megabytes:.0f} MB")

    def fork_instead(self, reason: str) -> bool:
        """Fork workers from now on, if the start method is "auto"; returns whether it is."""
        if self._method != "auto":
            return False
        if not self._has_logged:
            logger.info("%s. Workers are forked instead; the dataset must not use OneFlow in them.", reason)
            self._has_logged = True
        self.close()
        return True

    def start(self, handles: WorkerHandles) -> WorkerProcess:
        """Start a worker that uses these descriptors."""
        # Ctrl-C is for the trainer: SIGINT stays blocked until the worker ignores it.
        with signals_blocked({signal.SIGINT}):
            stderr = CapturedStderr()
            try:
                if self._shipment is not None:
                    return self._spawn(handles, self._shipment.descriptor, stderr)
                return self._fork(handles, stderr)
            except BaseException:
                stderr.close()
                raise

    def _spawn(self, handles: WorkerHandles, shipped: int, stderr: CapturedStderr) -> WorkerProcess:
        variables = {name: value for name, value in environment().items() if name not in JOB_VARIABLES}
        for name in _THREADS_OF_LIBRARIES:
            variables.setdefault(name, "1")
        inherited = [descriptor for name, descriptor in asdict(handles).items() if name not in ("number", "workers")]
        # A dataset may read the trainer's arguments.
        work_of = json.dumps([asdict(handles), shipped, arguments(), _descriptors()])
        program = subprocess.Popen(
            [*interpreter(), "-c", _BOOT, work_of, json.dumps(import_paths())],
            pass_fds=[*inherited, shipped],
            env=variables,
            stdin=subprocess.DEVNULL,
            stderr=stderr.descriptor,
        )
        return WorkerProcess(program.pid, stderr, program)

    def _fork(self, handles: WorkerHandles, stderr: CapturedStderr) -> WorkerProcess:
        _flush()
        process = WorkerProcess(0, stderr)
        collects = gc.isenabled()
        # No code that runs at a fork may free the trainer's objects in the child before they are kept for good.
        gc.disable()
        try:
            process.pid = os.fork()
            if process.pid == 0:
                # Freeing a OneFlow tensor, for example, would wait for threads that a fork lacks.
                gc.freeze()
        finally:
            if collects:
                gc.enable()
        if process.pid == 0:
            self._run_as_fork(handles, stderr)
        return process

    def _run_as_fork(self, handles: WorkerHandles, stderr: CapturedStderr) -> NoReturn:
        try:
            os.dup2(stderr.descriptor, STDERR)
            sys.stderr = open(STDERR, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
            _open_files_again()
            _renew_thread_pools()
            _run_only_new_exit_handlers()
            prepare_process(handles.parent_pipe)
            work(handles, self.payload)
            # These steps are the first of the interpreter's end. The others would free the trainer's objects, so the
            # last exit handler ends the fork.
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        except BaseException:
            traceback.print_exc()
        finally:
            _flush()
            os._exit(1)

    def close(self) -> None:
        """Release the shipped dataset."""
        if self._shipment is not None:
            self._shipment.close()
            self._shipment = None


def _descriptors() -> str:
    """The trainer's descriptors above standard error: files, pipes, connections and others; as `numbers_in_words`."""
    # As ranges, because thousands of single numbers may be longer than an argument of a program can be.
    return numbers_in_words(sorted(number for number in map(int, os.listdir("/proc/self/fd")) if number > STDERR))


def _open_files_again() -> None:
    """Reopen the files that the trainer reads, under the same numbers: a fork shares even the position in a file.

    Otherwise, workers that read an open file of the dataset would move each other's position. A connection cannot be
    reopened. A closed one replaces it, so that a client connects again or raises an error; if workers shared the
    connection, they would get each other's answers.
    """
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # The descriptor of the listing itself, or of a file that may not be reopened.
            path, flags = f"/proc/self/fd/{number}", fcntl.fcntl(number, fcntl.F_GETFL)
            is_read = flags & os.O_ACCMODE != os.O_WRONLY and not flags & (os.O_APPEND | os.O_PATH)
            mode = os.fstat(number).st_mode
            if number > STDERR and is_read and stat.S_ISREG(mode) and not _is_memory(path):
                own = os.open(path, flags & (os.O_ACCMODE | os.O_DIRECT) | os.O_CLOEXEC)
                os.lseek(own, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(own, number, os.get_inheritable(number))
                os.close(own)
            elif number > STDERR and stat.S_ISSOCK(mode) and _is_connection(number):
                ended, other = socket.socketpair()
                other.close()
                os.dup2(ended.fileno(), number, os.get_inheritable(number))
                ended.close()


def _is_connection(number: int) -> bool:
    """Whether a descriptor is a connection to an address; socket pairs, such as workers' channels, have no address."""
    default = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)  # With a timeout, the trainer's socket, which shares the flags, would not block.
    try:
        with socket.socket(fileno=os.dup(number)) as found:
            return found.type == socket.SOCK_STREAM and bool(found.getpeername())
    finally:
        socket.setdefaulttimeout(default)


def _renew_thread_pools() -> None:
    """Let thread pools start new threads when they are used: the trainer's threads do not run in a fork."""
    for thread in list(thread_pools._threads_queues):
        pool = thread._args[0]() if hasattr(thread, "_args") else None
        if pool is not None:
            pool._threads, pool._work_queue = set(), queue.SimpleQueue()
            pool._idle_semaphore, pool._shutdown_lock = threading.Semaphore(0), threading.Lock()


def _is_memory(path: str) -> bool:
    return os.readlink(path).startswith("/memfd:")


def _run_only_new_exit_handlers() -> None:
    """Run only the exit handlers that the dataset registers in this fork, and not those of the trainer's libraries.

    Handlers run from the last to the first, so the fork ends before the trainer's handlers would begin. These stay
    registered, because freeing them may free objects that only the trainer can free.
    """
    atexit.register(_end_fork)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    # Proxies of a `Manager` reconnect.
    multiprocessing.util._run_after_forkers()  # type: ignore[attr-defined]
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]


def _end_fork() -> NoReturn:
    _flush()
    os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError, OSError):  # There is no stream, or it is closed.
            stream.flush()


class CapturedStderr(OwnDescriptors):
    """Standard error of a worker, captured in memory; the trainer prints it to its own `sys.stderr`.

    A worker cannot inherit the trainer's `sys.stderr`: in notebooks and captured logs, it has no descriptor.
    """

    _names = "descriptor", "_memory"
    descriptor = _memory = -1

    def __init__(self) -> None:
        self._process = os.getpid()
        self._memory = os.memfd_create("libai_data_stderr", os.MFD_CLOEXEC)
        self.descriptor = os.open(f"/proc/self/fd/{self._memory}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._passed_on = 0
        self._tail = b""

    def pass_on(self) -> None:
        """Print what the worker has printed since the last call."""
        size = os.fstat(self._memory).st_size if self._memory >= 0 else self._passed_on
        if size <= self._passed_on:
            return
        text = os.pread(self._memory, size - self._passed_on, self._passed_on)
        self._passed_on = size
        self._tail = (self._tail + text)[-_TAIL_BYTES:]
        if size > _MOST_STDERR_BYTES:
            os.ftruncate(self._memory, 0)
            self._passed_on = 0
        with suppress(AttributeError, ValueError, OSError):  # There is no `sys.stderr`, or it is closed.
            sys.stderr.write(text.decode(errors="replace"))
            sys.stderr.flush()

    def last_output(self) -> str:
        """The end of what the worker printed, for messages about how it ended; "" if it printed nothing."""
        self.pass_on()
        text = self._tail.decode(errors="replace").strip()
        return f"; its last output:\n{text}\n" if text else ""

    def close(self) -> None:
        """Print the rest, and release the memory."""
        self.pass_on()
        self._release(*self._names)


class WorkerProcess:
    """A worker that this process started, a `program` or a fork. If a Ctrl-C comes before the pool has it, it ends."""

    pid = _parent = 0

    def __init__(self, pid: int, stderr: CapturedStderr, program: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self.stderr = stderr
        self._program = program
        self._code: int | None = None
        self._parent = os.getpid()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        is_own = not is_finalizing() and self._parent == os.getpid()  # see `OwnDescriptors`
        if is_own and self.pid and self._program is None and self._poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(deadline=time.monotonic() + _SECONDS_TO_END)

    @property
    def is_program(self) -> bool:
        """Whether the worker is a separate program, which unpickles the dataset."""
        return self._program is not None

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self._poll() is None:
            os.kill(self.pid, number)

    def wait(self, deadline: float | None = None) -> str:
        """Wait for the process, which is about to end; returns how it ended, in words.

        By default, the process is killed after 10 seconds, and the wait ends after 10 more; or at the `deadline`.
        """
        until = time.monotonic() + _SECONDS_TO_END if deadline is None else deadline
        while self._poll() is None:
            if time.monotonic() > until and deadline is not None:
                return (
                    "was killed but does not end, because it waits inside the system, perhaps for storage that does "
                    "not answer. It ends when this wait ends"
                )
            if time.monotonic() > until:
                os.kill(self.pid, signal.SIGKILL)
                until = deadline = time.monotonic() + _SECONDS_TO_END
            time.sleep(0.001)
        code = self._code or 0
        if code >= 0:
            return f"ended with exit code {code}"
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{hint}"

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._poll() is not None

    def _poll(self) -> int | None:
        if self._code is None:
            if self._program is not None:
                self._code = self._program.poll()
            else:
                self._code = _exit_code(self.pid)
        return self._code


def _exit_code(pid: int) -> int | None:
    """The exit code of a child, negative for a signal; None while it runs."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0  # Other code has waited for the process, or this process is a fork of the trainer.
    if not ended:
        return None
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
