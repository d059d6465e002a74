"""Ends the job if a rank fails, dies or leaves early, and names the rank.

In any program, each rank begins to watch the others as soon as it has imported OneFlow and this package. This waits for
no other rank; see `watchdog`. Before that, `import oneflow` waits for the last rank without a limit, and no
other thread of the process can run, so a child process ends the wait. The import hook of `launch/cuda_libraries.py`
enters `joining`, so this works in any script that imports this package before OneFlow.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Callable, NoReturn

from libai_data.errors import ConfigError, MeshError
from libai_data.launch.job_environment import SECONDS_TO_JOIN_VARIABLE, rank_numbers, seconds_to_join
from libai_data.launch.joining_pipe import FAILED, JOINED, WAITS, tell_launcher
from libai_data.launch.ports import reserve_port
from libai_data.mesh.peers.batch_notes import BatchPlace
from libai_data.mesh.peers.interrupts import deferring_interrupts, keeping_interrupt_handler
from libai_data.mesh.peers.links import seconds_to_meet
from libai_data.mesh.peers.same_job import RANK_0, Rank0Answers, refuse_rank0_of_another_job, wait_for_own_rank0
from libai_data.mesh.peers.standstill import BATCH, COLLECTIVE, FIRST_MEETING
from libai_data.mesh.peers.watchdog import SECONDS_FOR_THE_CAUSE, Liveness, end_after, end_process

# Loading this module connects to the other ranks.
_JOINS = "oneflow._oneflow_internal"
_SECONDS_TO_WRITE = 1.0
_NO_RANK = (
    "this process was forked from a process that had imported OneFlow, so it cannot be a rank; start it by the "
    "launcher, or as a program of its own (multiprocessing's method 'spawn')"
)
_liveness: Liveness | None = None
_beginning = threading.Lock()
_forked = False


@contextmanager
def joining() -> Iterator[None]:
    """Wraps the import of OneFlow, which joins this process to the job: ends the process if other ranks start too late.

    After the import, or at once if OneFlow is imported already, the process watches the other ranks. From then on,
    Ctrl-C raises KeyboardInterrupt. If there is only one rank, a Ctrl-C during the import raises it after the import.
    Raises ConfigError if rank 0 of another job uses the port, or a variable of the job is impossible.
    """
    interrupts = deferring_interrupts() if _rank_of_several() is None else keeping_interrupt_handler()
    with interrupts, _joining_within_limits():
        yield


def loading() -> AbstractContextManager[None]:
    """Wraps the load of OneFlow's extension module, inside `joining`.

    While a rank waits for others, no Python code can run. So it keeps OneFlow's handler of Ctrl-C, which ends it.
    """
    return keeping_interrupt_handler() if _rank_of_several() is None else nullcontext()


def _rank_of_several() -> tuple[int, int, int] | None:
    """Rank, world size and port of one of several ranks, by the environment; a ConfigError names a wrong variable."""
    # Without all of these, OneFlow starts a job of one rank. It sets RANK=-1 then, which later processes inherit.
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK") if name not in os.environ]
    world_size = os.environ.get("WORLD_SIZE", "1")
    if missing and world_size.isdecimal() and int(world_size) > 1:
        raise ConfigError(
            f"WORLD_SIZE is {world_size}, but the environment has no {' and no '.join(missing)}, so each process would "
            "run alone, on all the data; start the ranks by libai-data launch, or set the variables. For one process, "
            "unset WORLD_SIZE"
        )
    if missing:
        return None
    optional = {"LOCAL_RANK": "0", **os.environ}
    if os.environ["WORLD_SIZE"] == "1" and os.environ["RANK"] == "-1":
        optional["RANK"] = "0"
    numbers = rank_numbers(optional)
    several = numbers["WORLD_SIZE"] > 1
    return (numbers["RANK"], numbers["WORLD_SIZE"], numbers["MASTER_PORT"]) if several else None


@contextmanager
def _joining_within_limits() -> Iterator[None]:
    several = _rank_of_several()
    if several is None:
        yield
        return
    rank, world_size, port = several
    if _JOINS in sys.modules:
        yield
        tell_launcher(JOINED)
        begin_to_watch()
        return
    seconds = seconds_to_join()
    late = (
        f"rank {rank} ends: the {world_size} ranks have not all started within {seconds:g} s; were all of them "
        f"started, with the same MASTER_ADDR and MASTER_PORT? {SECONDS_TO_JOIN_VARIABLE} sets how long to wait\n"
    )
    if rank == 0:
        with reserve_port(port, RANK_0):  # until OneFlow listens on it
            refuse_rank0_of_another_job(rank, port)
            with _ending_after(seconds, late, port), _reporting_to_launcher():
                yield
    else:
        with _ending_after(seconds, late), _reporting_to_launcher():
            wait_for_own_rank0(rank, port)
            yield
    begin_to_watch()


@contextmanager
def _reporting_to_launcher() -> Iterator[None]:
    tell_launcher(WAITS)
    state = FAILED
    try:
        yield
        state = JOINED
    finally:
        tell_launcher(state)


@contextmanager
def _ending_after(seconds: float, message: str, port: int | None = None) -> Iterator[None]:
    """Fork a child that kills this process if the block takes longer than `seconds`.

    If there is a `port`, this is rank 0: the child answers for it, because no other thread of this process can run.
    """
    parent = os.getpid()
    end_read, end_write = os.pipe()
    answers = None if port is None else Rank0Answers(port, has_joined=False)
    child = os.fork()
    if child == 0:
        # Only system calls: at the fork, other threads of the parent may have held any lock.
        try:
            os.close(end_write)
            # The pipe is readable after the end of the block, and after the end of the parent.
            if not _is_readable(end_read, seconds, answers) and os.getppid() == parent:
                _write_to_stderr(message)
                os.kill(parent, signal.SIGKILL)
        finally:
            os._exit(0)
    os.close(end_read)
    if answers is not None:
        answers.close()
    try:
        yield
    finally:
        # Closing the pipe is not enough: a process that was forked in the block also has it open.
        os.write(end_write, b".")
        os.close(end_write)
        os.waitpid(child, 0)


def _is_readable(end_read: int, seconds: float, answers: Rank0Answers | None) -> bool:
    """Whether `end_read` becomes readable within `seconds`; meanwhile, `answers` answers questions."""
    end = time.monotonic() + seconds
    ends: list[Any] = [end_read] if answers is None else [end_read, answers]
    while (left := end - time.monotonic()) > 0:
        ready, _, _ = select.select(ends, [], [], left)
        if end_read in ready:
            return True
        if ready and answers is not None:
            with suppress(OSError):  # The sender cannot be reached.
                _write_to_stderr(answers.answer_one())
    return False


def _write_to_stderr(text: str) -> None:
    if text and select.select([], [2], [], _SECONDS_TO_WRITE)[1]:  # A stopped terminal (Ctrl-S) is not writable.
        os.write(2, text.encode())


def _in_forked_child() -> None:
    """Make a forked child of a rank no rank: the child does not watch other ranks or shut down OneFlow."""
    global _liveness, _forked
    oneflow = sys.modules.get("oneflow")
    _liveness, _forked = None, oneflow is not None
    holder = vars(oneflow).get("__oneflow_global_unique_env") if oneflow else None
    if holder is not None:
        # In the child, OneFlow's shutdown would wait for threads of the parent. It would also end the parent's
        # connections to the other ranks, so these ranks would never end either.
        holder.switch_to_shutting_down = lambda *_: None
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(holder._env_cxt))


os.register_at_fork(after_in_child=_in_forked_child)


def begin_to_watch() -> Liveness | None:
    """Begin to watch the other ranks, once per process, without waiting for them; None if OneFlow is not imported.

    From then on, an uncaught exception ends this process at once. If the process ends in another way, it sends a
    farewell to the others.
    """
    global _liveness
    if _liveness is not None or "oneflow" not in sys.modules or _forked:
        return _liveness
    import oneflow as flow

    with _beginning:
        if _liveness is None:
            rank, world_size = flow.env.get_rank(), flow.env.get_world_size()
            _liveness = Liveness(rank, world_size, flow.env.get_node_size(), flow.cuda.is_available())
            if world_size > 1:
                atexit.register(say_farewell)
                sys.exit = partial(_exit, _liveness)
                sys.excepthook = partial(_end_after, sys.excepthook, rank)
                if rank == 0 and (several := _rank_of_several()) is not None:
                    Rank0Answers(several[2], has_joined=True).answer_from_now_on()
    return _liveness


def begin_collective(what: str = "", words: str = "") -> dict[int, str]:
    """Announce that this rank begins a collective of this package; see `Liveness.begin_collective`.

    Raises MeshError, too, if this process is a fork of a rank.
    """
    if what and not _forked:
        importlib.import_module("oneflow")  # The import makes this process a rank, which can meet the others.
    liveness = begin_to_watch()
    if liveness is None and what:
        raise MeshError(_NO_RANK)
    return {} if liveness is None else liveness.begin_collective(what, words)


def collectives_begun() -> int:
    """The number of collectives of this package that this rank has begun; equal on all ranks within a collective."""
    return 0 if _liveness is None else _liveness._collectives


def note_batch(place: BatchPlace) -> None:
    """Compare the batch of the newest collective with those of other ranks; see `Liveness.note_batch`."""
    if _liveness is not None:
        _liveness.note_batch(place)


@contextmanager
def in_collective(what: str) -> Iterator[None]:
    """Wraps a collective of OneFlow, which no rank completes before all have begun it; raises as `begin_collective`.

    `what` is the name of the collective, in errors too. It must be the same on all ranks.
    """
    begin_collective(what)
    with _in_place(COLLECTIVE, what):
        yield


def waiting_for_rank(what: str) -> AbstractContextManager[None]:
    """Wraps code of the main thread that waits until another rank's main thread passes on or uses a batch."""
    return _in_place(BATCH, what)


def _in_place(kind: str, what: str) -> AbstractContextManager[None]:
    if _liveness is None or threading.current_thread() is not threading.main_thread():
        return nullcontext()
    return _liveness.waiting(kind, what)


def watch_over_ranks(what: str = "") -> Liveness:
    """Meet the other ranks, within `seconds_to_meet()`; see `RankLinks.meet`. The first call is collective.

    With `what`, each call is collective: the job ends if other ranks give another `what`, which the error then names.
    """
    import oneflow as flow

    liveness = begin_to_watch()
    if liveness is None:
        raise MeshError(_NO_RANK)
    if flow.env.get_world_size() > 1:
        with _ending_unless_all_come(flow.env.get_rank()), _in_place(COLLECTIVE, FIRST_MEETING):
            liveness.meet()
    if what:
        liveness.begin_collective(what)
    return liveness


def _end_after(print_exception: Callable[..., Any], rank: int, *exception: Any) -> None:
    if _forked or not issubclass(exception[0], KeyboardInterrupt):
        print_exception(*exception)
    if not _forked:
        end_after(exception[1], rank)


def _exit(liveness: Liveness, code: Any = None) -> NoReturn:
    """Replaces `sys.exit` on a rank.

    OneFlow's `sys.exit` stores the code for good. Then this rank does not meet the others at its end, even if the
    program has caught the SystemExit, and the others wait for it.
    """
    if not _forked:
        liveness.note_exit(code)
    raise SystemExit(code)


def say_farewell() -> None:
    """Tell the other ranks that this rank ends. A process that exits does this by itself."""
    global _liveness
    if _liveness is not None:
        _liveness.farewell()
        if _liveness._world_size == 1:
            _liveness = None


@contextmanager
def _ending_unless_all_come(rank: int) -> Iterator[None]:
    """End this process if all ranks do not meet in the block in time; the block may wait in a collective of OneFlow."""
    seconds = seconds_to_meet()
    message = f"rank {rank} ends: not all ranks have started within {seconds:g} s; do they run the same program?"
    # A rank that waits for connections can name the missing ranks, so it must report first.
    timer = threading.Timer(seconds + SECONDS_FOR_THE_CAUSE, end_process, (1, message))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
