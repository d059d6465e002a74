"""A loader belongs to one process: a fork reads on its own or gets an error, and takes nothing from the parent."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import sys
import threading
from typing import Any, Callable

import pytest

from libai_data import DataLoader, from_iterable
from libai_data.data.cached_property import cached_property
from libai_data.data.fork_lock import ForkLock
from libai_data.errors import PassError
from tests.deadline import run_to_end
from tests.properties import slowly

ROWS = [[2 * number, 2 * number + 1] for number in range(20)]


def loader(num_workers: int, worker_type: str = "process") -> Any:
    return DataLoader([{"x": number} for number in range(40)], 2, num_workers=num_workers, worker_type=worker_type)


def stream(num_workers: int, num_shards: int | None) -> Any:
    def rows(shard: int, num_shards: int) -> Any:
        return ({"x": number} for number in range(shard, 40, num_shards))

    make = rows if num_shards else lambda: rows(0, 1)
    return from_iterable(make, 2, num_workers=num_workers, num_shards=num_shards)


MAKERS: dict[str, Callable[[], Any]] = {
    "in-process": lambda: loader(0),
    "processes": lambda: loader(2),
    "threads": lambda: loader(2, "thread"),
    "stream": lambda: stream(0, None),
    "stream in shards": lambda: stream(1, 1),
}


def rows_of(batches: Any) -> list[list[int]]:
    return [batch["x"].tolist() for batch in batches]


def in_fork(act: Callable[[], Any]) -> str:
    """What a forked process returns or raises."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            told = repr(act())
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(write, told.encode())
        os._exit(0)
    os.close(write)
    with open(read) as answer:
        told = answer.read()
    os.waitpid(child, 0)
    return told


@pytest.mark.parametrize("kind", list(MAKERS))
def test_a_fork_takes_nothing_from_its_parent(kind: str) -> None:
    made = MAKERS[kind]()
    batches = iter(made.numpy())
    first = next(batches)["x"].tolist()
    refused = f"belongs to process {os.getpid()}, of which this process is a fork; make a loader in this process"
    assert in_fork(lambda: next(batches)) == f"PassError: this iterator {refused}"
    anew = in_fork(lambda: rows_of(made.numpy()))
    assert anew == (f"PassError: this loader {refused}" if "stream" in kind else repr(ROWS))
    assert [first, *rows_of(batches)] == ROWS
    assert rows_of(made.numpy()) == ROWS
    made.close()


@pytest.mark.parametrize("kind", list(MAKERS))
def test_what_reads_is_neither_copied_nor_pickled(kind: str) -> None:
    made = MAKERS[kind]()
    batches = iter(made.numpy())
    next(batches)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            duplicate(batches)
        with pytest.raises(TypeError, match="a loader cannot be copied or pickled"):
            duplicate(made)
    made.close()


@pytest.mark.parametrize("kind", list(MAKERS)[:3])
def test_a_loader_that_has_not_begun_is_neither_copied_nor_pickled(kind: str) -> None:
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a loader cannot be copied or pickled"):
            duplicate(MAKERS[kind]())


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_threads_that_begin_one_loader_get_its_batches_or_are_told(kind: str) -> None:
    told: list[Any] = []
    made = MAKERS[kind]()
    together = threading.Barrier(3)

    def use() -> None:
        together.wait()
        try:
            told.append(rows_of(made.numpy())[-1])
        except PassError:
            pass
        except BaseException as error:
            told.append(error)

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == [ROWS[-1]] * len(told)
    assert rows_of(made.numpy()) == ROWS
    made.close()


def test_a_fork_finds_a_lock_free_that_another_thread_held() -> None:
    made, held, over = loader(0), threading.Event(), threading.Event()

    def hold() -> None:
        with made._turns:
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    told = in_fork(lambda: signal.alarm(10) or rows_of(made.numpy()))
    over.set()
    thread.join()
    assert told == repr(ROWS)


def test_a_fork_computes_a_property_that_a_thread_of_its_parent_is_computing() -> None:
    """In Python before 3.12, all objects of a class share the lock of a `functools.cached_property`."""
    computing, over = threading.Event(), threading.Event()

    class Slow:
        waits = False

        @cached_property
        def value(self) -> int:
            if self.waits:
                computing.set()
                over.wait()
            return 1

    slow = Slow()
    slow.waits = True
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    computing.wait()
    told = in_fork(lambda: signal.alarm(10) or Slow().value)
    over.set()
    thread.join()
    assert told == "1"


def test_a_lock_is_freed_once_although_garbage_is_collected_meanwhile() -> None:
    program = """
import gc, sys
from libai_data.data.fork_lock import ForkLock
lock = ForkLock()
sys.setprofile(lambda *_: gc.collect())
del lock
"""
    run_to_end([sys.executable, "-c", program], check=True)


def test_a_fork_within_a_lock_keeps_it() -> None:
    lock = ForkLock()

    def is_free_to_others() -> bool:
        found: list[bool] = []
        thread = threading.Thread(target=lambda: found.append(lock.acquire(blocking=False)))
        thread.start()
        thread.join()
        return found[0]

    with lock:
        assert in_fork(is_free_to_others) == "False"
    assert in_fork(is_free_to_others) == "True"


class Freed:
    """Tells in which process it is freed. Only a collection of garbage frees it."""

    def __init__(self, pipe: int) -> None:
        self.pipe, self.itself = pipe, self

    def __del__(self) -> None:
        os.write(self.pipe, b"%d " % os.getpid())


def test_a_worker_frees_nothing_of_the_trainer_at_the_fork() -> None:
    read, write = os.pipe()
    may_act = True

    def leave_garbage() -> None:
        if may_act:
            Freed(write)

    def collect_garbage() -> None:
        if may_act:
            # More than enough objects for a collection.
            assert [[number] for number in range(10_000)]

    os.register_at_fork(before=leave_garbage, after_in_child=collect_garbage)
    try:
        batches = DataLoader([{"x": number} for number in range(8)], 2, num_workers=2, start_method="fork")
        assert rows_of(batches) == ROWS[:4]
    finally:
        may_act = False
    gc.collect()
    assert set(os.read(read, 4096).split()) == {b"%d" % os.getpid()}
    os.close(read)
    os.close(write)


PROCESSES = {"num_workers": 2, "start_method": "fork"}
THREADS = {"num_workers": 2, "worker_type": "thread"}
IN_A_SHARD = {"num_workers": 1, "num_shards": 1}
WAYS: list[dict[str, Any]] = [{}, PROCESSES, THREADS]
IN_BATCHES, BY_TRANSFORM = "ForkingInBatches(7)", "Forking(-1), batch_transform=ForkingTransform()"
BY_COLLATOR = "Forking(-1), collate_fn=forking_collate"
FORKING = [
    ("Forking(7)", WAYS[1]),
    ("ForkingStream(7)", IN_A_SHARD),
    (IN_BATCHES, PROCESSES),
    slowly("Forking(7)", WAYS[0]),
    slowly("ForkingStream(7)", {}),
    slowly(BY_COLLATOR, PROCESSES),
    slowly(BY_TRANSFORM, {}),
    *(slowly("Forking(0)", options) for options in WAYS),
    *(slowly("ForkingStream(0)", options) for options in ({}, IN_A_SHARD)),
    *(slowly(source, THREADS) for source in ("Forking(7)", IN_BATCHES)),
    *(slowly(source, {}) for source in (IN_BATCHES, BY_COLLATOR, "ForkingStream(-1), collate_fn=forking_collate")),
    slowly(BY_TRANSFORM, PROCESSES),
    slowly("Forking(-1), worker_init_fn=forking_init", PROCESSES),
]


@pytest.mark.parametrize(("source", "options"), FORKING)
def test_a_reader_that_is_forked_by_its_dataset_delivers_each_sample_once(source: str, options: dict[str, Any]) -> None:
    # In a process of its own, whose forks hold its output until they end.
    program = (
        "from libai_data import DataLoader; from tests.loader.odd_datasets import *\n"
        f"loader = DataLoader({source}, batch_size=2, **{options})\n"
        "print([batch['x'].tolist() for batch in loader.numpy()], flush=True); loader.close()"
    )
    ended = run_to_end([sys.executable, "-c", program], 60)
    assert ended.stdout == f"{ROWS}\n", ended
    assert "A forked process ends" in ended.stderr, ended
