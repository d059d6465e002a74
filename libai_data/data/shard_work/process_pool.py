"""Processes that do jobs: separate programs that receive jobs over a pipe, and end with the process that sends them."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Callable, Generic, TypeVar

from libai_data.data.fork_lock import end_if_fork_of
from libai_data.errors import DataPipelineError, naming_open_files
from libai_data.launch.parent_pipe import ParentPipe, die_with_parent
from libai_data.launch.same_interpreter import arguments, environment, import_paths, interpreter
from libai_data.launch.signals import end_groups
from libai_data.mesh.peers.pickling import pickled

Job = TypeVar("Job")
Report = TypeVar("Report")

_JOBS_AHEAD = 2
_ATTEMPTS = 3


class WorkError(DataPipelineError, RuntimeError):
    """A process could not do a job."""


@dataclass(frozen=True)
class Work(Generic[Job, Report]):
    """A picklable function that does jobs, the name of a job for errors, and the error that is raised when a job fails.
    Each process calls its own copy of `do`, which may keep objects that take long to open."""

    do: Callable[[Job], Report]
    name: Callable[[Job], str]
    error: type[WorkError] = WorkError


def done_by_processes(work: Work[Job, Report], jobs: Iterable[Job], workers: int) -> Iterator[tuple[Job, Report]]:
    """Do jobs in `workers` processes; yields each job with its report, in the order of the jobs. A WorkError if a job
    failed, or several processes died while they did the same job."""
    pool = ProcessPool(work)
    pending: deque[tuple[Job, Future[Report]]] = deque()
    # Each thread only waits for a process, which does the work.
    with ThreadPoolExecutor(workers, thread_name_prefix="shard-work") as threads:
        try:
            for job in jobs:
                pending.append((job, threads.submit(pool.do, job)))
                if len(pending) >= workers * _JOBS_AHEAD:
                    done, report = pending.popleft()
                    yield done, report.result()
            while pending:
                done, report = pending.popleft()
                yield done, report.result()
        finally:
            for _, future in pending:
                future.cancel()
            pool.close()


class ProcessPool(Generic[Job, Report]):
    """One process for each thread that calls `do`."""

    @naming_open_files()
    def __init__(self, work: Work[Job, Report]) -> None:
        self._work = work
        self._parent_pipe = ParentPipe()
        self._own = threading.local()
        self._all: list[subprocess.Popen[bytes]] = []
        self._closed = False
        # The garbage collector may call `close` in a thread that has the lock.
        self._guard = threading.RLock()

    def do(self, job: Job) -> Report:
        """Do a job; a process that dies during the job is replaced, a few times. A WorkError if the job failed, several
        processes died, or the pool was closed."""
        died = 0
        while True:
            process = self._process()
            try:
                pickle.dump(job, process.stdin)
                process.stdin.flush()
                done, answer = pickle.load(process.stdout)
            except (EOFError, OSError, pickle.UnpicklingError) as error:
                code = self._end(process)
                self._own.process = None
                died += 1
                if self._closed:
                    raise self._work.error("the work was ended") from error
                if died == _ATTEMPTS:
                    raise self._work.error(
                        f"{died} processes died at {self._work.name(job)}, the last with exit code {code}; check that "
                        "there is enough memory, and run the program again"
                    ) from error
                continue
            if done:
                return answer
            raise self._work.error(f"{self._work.name(job)} failed:{answer}")

    def close(self) -> None:
        """End all processes, whatever they are doing."""
        with self._guard:
            self._closed = True
            for process in self._all:
                process.kill()
        end_groups([process.pid for process in self._all])
        for process in self._all:
            self._end(process)
        self._parent_pipe.close()

    @naming_open_files()
    def _process(self) -> Any:
        """The process of this thread, a `subprocess.Popen` with pipes."""
        found: Any = getattr(self._own, "process", None)
        if found is None:
            with self._guard:
                if self._closed:
                    raise self._work.error("the work was ended")
                found = _start(self._parent_pipe)
                self._all.append(found)
            self._own.process = found
            pickle.dump(self._work.do, found.stdin)
        return found

    @staticmethod
    def _end(process: Any) -> int:
        process.kill()
        code: int = process.wait()
        # What it forked has its pipes, and would keep a thread that reads them.
        end_groups([process.pid])
        for pipe in (process.stdin, process.stdout):
            # Closing a pipe sends what it has buffered, but the process has ended.
            with contextlib.suppress(OSError):
                pipe.close()
        return code


def _start(parent_pipe: ParentPipe) -> subprocess.Popen[bytes]:
    # The tokenizers' own threads would make each process take all cores.
    variables = {**environment(), "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    program = (
        "import sys; sys.path[:] = {!r}; sys.argv[:] = {!r}; "
        "from libai_data.data.shard_work.process_pool import serve; serve({})"
    )
    return subprocess.Popen(
        [*interpreter(), "-c", program.format(import_paths(), arguments(), parent_pipe.descriptor)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(parent_pipe.descriptor,),
        env=variables,
        start_new_session=True,
    )


def serve(parent_pipe: int) -> None:
    """Do the jobs that arrive on standard input, until it ends; `parent_pipe` is that of the sender."""
    import traceback

    die_with_parent(parent_pipe)
    answers = os.fdopen(os.dup(1), "wb")
    # Whatever a library prints must not end up among the answers.
    os.dup2(2, 1)
    do, process = pickle.load(sys.stdin.buffer), os.getpid()
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = pickled((True, do(job)))
        except DataPipelineError as error:  # Its message names the cause and the remedy.
            answer = pickled((False, f" {error}"))
        except BaseException:  # Also sys.exit in the user's code, which would end the replacements too.
            answer = pickled((False, f"\n{traceback.format_exc()}"))
        end_if_fork_of(process)
        answers.write(answer)
        answers.flush()
