"""What the tests of iterables compare: the rows of batches by their number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from libai_data import get_worker_info
from libai_data.iterables import from_iterable
from libai_data.structures import batch_info


def sample(number: int) -> dict:
    """A sample that tells its number."""
    return {"x": np.full((2, 3), number, np.float32), "y": number}


def numbers(epoch: int = 0) -> Iterator[dict]:
    """22 samples in an order of its own each round."""
    yield from (sample(int(number)) for number in np.random.default_rng(epoch).permutation(22))


class Stateful:
    """Tells and loads its state; splits itself; fails if rows that were to be skipped are read."""

    def __init__(self, size: int, first_allowed: int = 0) -> None:
        self.size, self.first_allowed, self.row, self.epoch = size, first_allowed, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.row, self.epoch = 0, epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        shard, shards = (0, 1) if info is None else (info.id, info.num_workers)
        while self.row < self.size + shard:
            assert self.row >= self.first_allowed, f"row {self.row} is read again"
            self.row += 1
            yield sample(10000 * self.epoch + (self.row - 1) * shards + shard)

    def state_dict(self) -> dict[str, int]:
        return {"row": self.row, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.row, self.epoch = state["row"], state["epoch"]


def rows_of(batch: Any) -> list[int]:
    """The numbers of a batch's rows, after checking that its fields belong together."""
    labels = batch.y.tensor.numpy().reshape(-1)
    x = batch.x.tensor.numpy().reshape(len(labels), -1)
    assert (x == labels[:, None]).all()
    return [int(label) for label in labels]


def taken(loader: Any, batches: int | None = None) -> list[tuple[Any, list[int]]]:
    """Place and rows of a loader's next batches; of a round if no number is given."""
    return [(batch_info(batch), rows_of(batch)) for batch in islice(iter(loader), batches)]


def flat(batches: list[tuple[Any, list[int]]]) -> list[int]:
    """The rows of batches, one after the other, without padding."""
    return [row for info, rows in batches for row in rows[: info.valid]]


def resumed(make: Any, cut: int, count: int, **options: Any) -> list[tuple[Any, list[int]]]:
    """What a loader gives after another one was stopped after `cut` batches and told its state, as a checkpoint has it.

    Args:
        make: makes the iterable anew, as a new process would.
        cut: batches before the stop.
        count: batches after it.
        **options: of `from_iterable`.
    """
    stopped = from_iterable(make(), **options)
    taken(stopped, cut)
    state = json.loads(json.dumps(stopped.state_dict()))
    stopped.close()
    again = from_iterable(make(), **options)
    again.load_state_dict(state)
    found = taken(again, count)
    again.close()
    return found
