"""A Ctrl-C between any two lines of the loader: the next pass goes on where the state says, with nothing lost."""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import libai_data.loader
from libai_data.data.samplers.cursor import Cursor
from libai_data.iterables import from_iterable
from libai_data.launch import parent_pipe
from libai_data.loader import arena, shipping, starting, worker_pool
from libai_data.loader.iteration import Pass
from libai_data.loader.one_thread import OneThread
from libai_data.mesh.peers import channel
from tests.deadline import wait_until
from tests.distributed.processes import children_of
from tests.loader.interrupting import interrupted_at, without_collections
from tests.loader.sample_datasets import Numbers
from tests.loader.streams import (
    WORKER_NAMES,
    WORKERS,
    content,
    descriptors,
    loader_threads,
    loading,
    stream,
)
from tests.properties import slowly

LOADER = str(Path(libai_data.loader.__file__).parent)
BATCHES = 12


# One of so many lines, by what a loader of the kind costs; the long run takes them all where that is little.
@pytest.mark.parametrize(
    ("arguments", "between"),
    [(WORKERS[0], 7), slowly(WORKERS[0], 1), (WORKERS[1], 11), slowly(WORKERS[1], 1)]
    + [slowly(WORKERS[2], 17), slowly(WORKERS[3], 37)],
    ids=["in-process", "in-process-all", "thread", "thread-all", "fork", "spawn"],
)
def test_an_interrupt_at_any_line_loses_no_batch(arguments: dict[str, Any], between: int) -> None:
    dataset = Numbers()
    expected = stream(dataset, batches=BATCHES)
    line, interruptions = 0, 0
    while interruptions == line // between:
        line += between
        with loading(dataset, prefetch=2, **arguments) as loader:
            batches = iter(loader)
            taken = [content(next(batches)) for _ in range(2)]
            try:
                with interrupted_at(line, LOADER):
                    taken += [content(batch) for batch in islice(batches, 1)]
            except KeyboardInterrupt:
                interruptions += 1
            place = loader.state_dict()["position"] // 4
            # The batch under way when the interrupt came was taken or not; the state knows.
            assert place in (2, 3) and taken[:place] == expected[: len(taken)]
            rest = [content(batch) for batch in islice(iter(loader), BATCHES - place)]
            assert rest == expected[place:], f"interrupted at line {line}"
    assert interruptions > 2


@pytest.mark.parametrize("arguments", WORKERS[:2], ids=WORKER_NAMES[:2])
def test_an_interrupt_while_a_pass_begins_skips_no_epoch(arguments: dict[str, Any]) -> None:
    with closing(from_iterable(Numbers(), 4, **arguments)) as loader:
        state, interruptions = loader.state_dict(), -1
        for line in count(1):
            loader.load_state_dict(state)
            interruptions += 1
            try:
                with interrupted_at(line, LOADER):
                    iter(loader)
                break
            except KeyboardInterrupt:
                iter(loader)
                assert loader.state_dict() == state, f"interrupted at line {line}"
    assert interruptions > 10


class Signalled(Numbers):
    """Its process gets a signal while it reads one of the samples for the first time."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            self.at = -1
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().__getitem__(index)


class Leaving:
    """A handler in a class, behind another one."""

    def handle(self, number: int, frame: Any) -> None:
        self.leave()

    def leave(self) -> None:
        raise SystemExit(7)


def leave(*_: Any) -> None:
    raise SystemExit(7)


class Interrupting(Cursor):
    """A cursor. When the next cursor replaces it, a Ctrl-C comes, which Python handles after the next call."""

    __del__ = partial(_thread.interrupt_main)


@pytest.mark.skipif(sys.version_info < (3, 10), reason="Python 3.9 handles a signal after each assignment, too")
def test_a_ctrl_c_when_the_cursor_moves_comes_after_the_user_has_the_batch() -> None:
    kinds: Iterator[type[Cursor]] = iter([Interrupting, Cursor, Cursor])
    taken = ((f"batch {number}", kind(number)) for number, kind in enumerate(kinds, 1))
    stream = SimpleNamespace(cursor=Cursor(0))
    batches: list[Any] = []
    with pytest.raises(KeyboardInterrupt), without_collections():
        for batch in Pass(stream, stream.cursor, lambda: next(taken), OneThread()):  # type: ignore[arg-type, return-value]
            batches.append(batch)
    assert batches == ["batch 1", "batch 2"]
    assert stream.cursor == Cursor(2)


@pytest.mark.parametrize("workers", WORKERS[:2], ids=WORKER_NAMES[:2])
@pytest.mark.parametrize("handler", [leave, Leaving().handle, partial(leave, 1)], ids=["function", "method", "partial"])
@pytest.mark.parametrize("at", [0, 9])
def test_sys_exit_in_a_signal_handler_ends_the_program_with_its_code(
    workers: dict[str, Any], handler: Any, at: int
) -> None:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        # Python ignores an exit within a finalizer: of a batch, if it were not kept, or of what a collection frees.
        error = pytest.raises(SystemExit)
        with loading(Signalled(at), on_error="skip", **workers) as loader, error as ended, without_collections():
            list(loader)
        assert ended.value.code == 7
    finally:
        signal.signal(signal.SIGUSR1, before)


class HeldUp(Numbers):
    """Notes what is read; sample 4 waits."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []
        self.waits, self.go_on = threading.Event(), threading.Event()

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        if index == 4:
            self.waits.set()
            self.go_on.wait()
        return super().__getitem__(index)


def test_the_next_pass_does_not_first_read_what_an_abandoned_one_would_have_read() -> None:
    dataset = HeldUp()
    with loading(dataset, num_workers=1, worker_type="thread", prefetch=8) as loader:
        next(iter(loader))
        dataset.waits.wait()
        already = len(dataset.read)
        loader.set_epoch(7)
        dataset.go_on.set()
        next(iter(loader))
        # The rest of the task that the thread was at, and then the new pass.
        assert dataset.read[already : already + 2] == [5, 0]


@pytest.mark.parametrize("arguments", [*WORKERS[:3], slowly(WORKERS[3])], ids=WORKER_NAMES)
def test_interrupted_waits_leave_no_memory_behind(arguments: dict[str, Any]) -> None:
    with loading(Numbers(), prefetch=2, **arguments) as loader:
        slots, lengths = [], []
        for _ in range(4):
            batches = iter(loader)
            next(batches)
            with pytest.raises(KeyboardInterrupt), interrupted_at(12, LOADER):
                next(batches)
            arena = loader._arena
            slots.append(len(loader._slot_list.slots))
            lengths.append(os.fstat(arena.descriptor).st_size if arena.descriptor >= 0 else len(arena._mapped))
        assert max(slots) <= slots[0] + 2 and max(lengths) <= 2 * lengths[0] + 2


def test_memory_that_ranks_share_does_not_grow_when_workers_end() -> None:
    with loading(Numbers(), num_workers=2, start_method="fork") as loader:
        arena = loader.shared_arena()
        sizes = []
        for _ in range(3):
            next(iter(loader))
            loader._end_workers()
            sizes.append(os.fstat(arena.descriptor).st_size)
        assert len(set(sizes)) == 1


def children() -> set[int]:
    """Processes that this one started and has not waited for."""
    subprocess._cleanup()  # type: ignore[attr-defined]
    return children_of(os.getpid())


@pytest.mark.parametrize(
    ("method", "between"),
    [("fork", 17), slowly("spawn", 97), slowly("fork", 1)],
)
def test_an_interrupt_while_workers_start_leaves_no_process_descriptor_or_blocked_signal(
    method: str, between: int
) -> None:
    files = tuple(str(module.__file__) for module in (starting, worker_pool, arena, shipping, parent_pipe))
    with loading(Numbers(), num_workers=1, start_method=method) as loader:
        next(iter(loader))
    before, processes, line, interruptions = descriptors(), children(), 0, 0
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    while interruptions == line // between:
        line += between
        with loading(Numbers(), num_workers=1, start_method=method) as loader:
            try:
                with interrupted_at(line, files):
                    next(iter(loader))
            except KeyboardInterrupt:
                interruptions += 1
        assert descriptors() <= before, f"interrupted at line {line}"
        if method == "spawn":  # A program notices the trainer's closed end when it has started.
            wait_until(lambda: children() == processes, f"end of the worker, interrupted at line {line}")
        assert children() == processes, f"interrupted at line {line}"
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == blocked, f"interrupted at line {line}"
    assert interruptions > 2


@pytest.mark.parametrize(
    ("arguments", "between"),
    [(WORKERS[1], 5), slowly(WORKERS[1], 1), (WORKERS[2], 61), slowly(WORKERS[2], 5), slowly(WORKERS[3], 29)],
)
def test_a_close_that_is_interrupted_at_any_line_can_be_repeated(arguments: dict[str, Any], between: int) -> None:
    files = (LOADER, *(str(module.__file__) for module in (parent_pipe, channel)))
    with loading(Numbers(), **arguments) as loader:
        next(iter(loader))
    before, processes, threads, line, interruptions = descriptors(), children(), loader_threads(), 0, 0
    # While workers end, the same lines run again and again.
    while interruptions == line // between and line < 700:
        line += between
        with loading(Numbers(), **arguments) as loader:
            next(iter(loader))
            try:
                with interrupted_at(line, files):
                    loader.close()
            except KeyboardInterrupt:
                interruptions += 1
        wait_until(lambda: loader_threads() <= threads, f"end of the threads, interrupted at line {line}")
        assert descriptors() <= before and children() == processes, f"interrupted at line {line}"
    assert interruptions > 2
