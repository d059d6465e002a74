"""Another thread closes a loader between any two lines: the pass says so, and no batch is lost, repeated or torn."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

import libai_data
from libai_data import from_iterable
from libai_data.data.samplers import CyclicSampler
from libai_data.errors import PassError, SampleError
from libai_data.iterables.combined import CombinedLoader
from libai_data.loader import BatchLoader
from libai_data.loader.starting import WorkerStarter
from libai_data.structures import Instance
from tests.deadline import stretched, wait_until
from tests.loader.interrupting import acting_at
from tests.loader.sample_datasets import Numbers
from tests.loader.streams import WORKERS
from tests.properties import slowly

FILES = tuple(str(Path(libai_data.__file__).with_name(folder)) for folder in ("loader", "iterables", "delivery"))
BATCHES = 3
LOCKED_SECONDS = 0.1  # how long the line waits for a `close` that may itself wait for the line's thread


class Waiting:
    """Yields two batches of four samples. The next sample comes only in a later pass."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.is_waiting = False

    def __call__(self, epoch: int) -> Iterator[dict[str, np.ndarray]]:
        for number in range(40):
            if number == 8 and not self.goes_on.is_set():
                self.is_waiting = True
                self.goes_on.wait()
            yield {"x": np.full(3, number)}


def shards(epoch: int, shard: int, num_shards: int) -> Iterator[dict[str, np.ndarray]]:
    for number in range(shard, 40, num_shards):
        yield {"x": np.full(3, number)}


def indexed(**options: Any) -> Any:
    dataset = Numbers()
    return BatchLoader(dataset, CyclicSampler(dataset, 4), prefetch=2, **options)


def read(source: Any, **options: Any) -> Any:
    return from_iterable(source, 4, ends="cycle", timeout=stretched(30), **options)


def combined(source: Any) -> Any:
    return CombinedLoader({"first": indexed(num_workers=0), "second": read(source)})


def numbers(batch: Instance) -> list[Any]:
    values = [batch.get(name) for name in batch.get_fields()]
    return [numbers(value) if isinstance(value, Instance) else value.tensor.numpy().tolist() for value in values]


def first_batches(loader: Any, count: int) -> list[Any]:
    return [numbers(batch) for batch in islice(iter(loader), count)]


@pytest.mark.parametrize(
    ("make", "between"),
    [
        (lambda source: indexed(**WORKERS[0]), 61),
        (lambda source: indexed(**WORKERS[1]), 61),
        slowly(lambda source: indexed(**WORKERS[2]), 61),
        (read, 31),
        slowly(read, 5),
        (lambda source: read(shards, num_shards=2), 43),
        slowly(lambda source: read(shards, num_shards=2, num_workers=2), 301),
        (combined, 43),
        slowly(combined, 5),
    ],
    ids=[
        "in-process",
        "thread",
        "fork",
        "iterable",
        "iterable-all",
        "shards",
        "shards-processes",
        "several",
        "several-all",
    ],
)
def test_a_close_at_any_line_ends_the_pass_and_nothing_is_lost(make: Callable[[Any], Any], between: int) -> None:
    line, closed, while_waiting = 0, 0, 0
    waits_for_nothing = Waiting()
    waits_for_nothing.goes_on.set()
    expected = first_batches(make(waits_for_nothing), BATCHES + 2)
    while closed == line // between and while_waiting < 5:
        line += between
        source = Waiting()
        loader = make(source)
        closing = threading.Thread(target=loader.close)

        def close(closing: threading.Thread = closing, source: Waiting = source) -> None:
            nonlocal while_waiting
            while_waiting += source.is_waiting
            closing.start()
            closing.join(LOCKED_SECONDS)

        taken: list[Any] = []
        batches = iter(loader)
        try:
            with acting_at(line, FILES, close):
                while len(taken) < BATCHES:
                    taken.append(numbers(next(batches)))
        except PassError as error:
            assert "the loader was closed" in str(error)
            assert not isinstance(error.__cause__, SampleError), f"line {line}: nobody heard of the end"
        source.goes_on.set()
        if closing.ident is not None:
            closed += 1
            closing.join()
        assert taken + first_batches(loader, 2) == expected[: len(taken) + 2], f"line {line}"
        loader.close()
    assert closed > 5


@pytest.mark.parametrize(("workers", "between"), [(WORKERS[2], 11), slowly(WORKERS[3], 17)], ids=["fork", "spawn"])
def test_no_worker_starts_after_a_close_at_any_line_of_a_replacement(
    workers: dict[str, Any], between: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[int] = []
    is_closed = threading.Event()
    start = WorkerStarter.start

    def started(*arguments: Any) -> Any:
        process = start(*arguments)
        late.extend([process.pid] if is_closed.is_set() else [])
        return process

    monkeypatch.setattr(WorkerStarter, "start", started)
    line, closed = 0, 0
    while closed == line // between:
        line += between
        is_closed.clear()
        loader = indexed(**workers)
        executor = take(loader)
        first = executor._pool.processes[0]
        first.send(signal.SIGKILL)
        wait_until(first.has_ended, "end of a worker")

        def close(loader: Any = loader) -> None:
            loader.close()
            is_closed.set()

        closing = threading.Thread(target=close)

        def begin(closing: threading.Thread = closing) -> None:
            closing.start()
            closing.join(LOCKED_SECONDS)

        with suppress(Exception), acting_at(line, FILES[0], begin):
            executor._replace(0)
        if closing.ident is not None:
            closed += 1
            closing.join()
            assert not late, f"line {line}"
            assert not executor.pids
        loader.close()
    assert closed > 5


def take(loader: Any) -> Any:
    """Read a batch; returns the executor that has read it."""
    next(iter(loader))
    return loader._reader._executor
