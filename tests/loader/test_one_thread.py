"""Another thread moves a loader between any two lines of a read: no batch is lost or comes twice."""

from __future__ import annotations

import threading
from typing import Any, Callable

import pytest

from libai_data.data.samplers import SingleRoundSampler
from libai_data.errors import PassError
from libai_data.loader import BatchLoader
from tests.loader.interrupting import acting_at
from tests.loader.sample_datasets import Numbers
from tests.loader.streams import WORKERS
from tests.loader.test_closing import FILES, indexed, numbers, read, shards
from tests.properties import slowly

BATCHES = 4
SECONDS = 30


def begin(loader: Any) -> list[Any]:
    return [numbers(next(iter(loader)))]


def restore(loader: Any) -> list[Any]:
    loader.load_state_dict(loader.state_dict())
    return begin(loader)


@pytest.mark.parametrize("move", [begin, restore])
@pytest.mark.parametrize(
    ("make", "between"),
    [
        (lambda: indexed(**WORKERS[0]), 61),
        slowly(lambda: indexed(**WORKERS[0]), 9),
        slowly(lambda: indexed(**WORKERS[2]), 121),
        slowly(lambda: read(shards), 21),
    ],
    ids=["in-process", "in-process-all", "fork", "iterable"],
)
def test_a_thread_that_moves_a_loader_at_any_line_of_a_read_gets_the_next_batch_or_an_error(
    move: Callable[[Any], list[Any]], make: Callable[[], Any], between: int
) -> None:
    loader = make()
    expected = [numbers(batch) for batch, _ in zip(loader, range(BATCHES + 1))]
    loader.close()
    line = moved = refused = 0
    while moved + refused == line // between:
        line += between
        loader = make()
        found: list[Any] = []
        errors: list[PassError] = []

        def act(loader: Any = loader, found: list[Any] = found, errors: list[PassError] = errors) -> None:
            def run() -> None:
                try:
                    found.extend(move(loader))
                except PassError as error:
                    errors.append(error)

            thread = threading.Thread(target=run, name="other", daemon=True)
            thread.start()
            thread.join(SECONDS)
            assert not thread.is_alive()

        with acting_at(line, FILES, act):
            try:
                for batch, _ in zip(iter(loader), range(BATCHES)):
                    found.append(numbers(batch))
            except PassError:
                assert not errors, f"line {line}: both threads were refused"
        loader.close()
        moved += 1 - len(errors) if len(found) != BATCHES or errors else 0
        refused += len(errors)
        assert found == expected[: len(found)], f"line {line}"
    assert refused > 5


def test_the_error_names_both_threads_and_the_reader_goes_on() -> None:
    may_go_on, reading = threading.Event(), threading.Event()

    class Slow(Numbers):
        def __getitem__(self, index: int) -> Any:
            reading.set()
            may_go_on.wait(SECONDS)
            return super().__getitem__(index)

    dataset = Slow()
    loader = BatchLoader(dataset, SingleRoundSampler(dataset, 4))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(map(numbers, loader)), name="reader")
    thread.start()
    assert reading.wait(SECONDS)
    state = loader.state_dict()
    for move in (lambda: iter(loader), lambda: loader.load_state_dict(state), lambda: loader.set_epoch(3)):
        with pytest.raises(PassError, match="reader uses this loader now, and MainThread cannot"):
            move()
    may_go_on.set()
    thread.join(SECONDS)
    assert len(found) == len(loader)
    assert loader.state_dict() != state
    assert found != [numbers(batch) for batch in loader]  # the next epoch
