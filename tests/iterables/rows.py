"""Iterables of the tests, in a module that a worker process imports quickly, and the numbers of the rows in batches."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from libai_data import get_worker_info
from libai_data.iterables import default_collate, from_iterable
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


class Placed:
    """Yields samples of the listed numbers, from the place of its state on."""

    def __init__(self, listed: Iterable[int]) -> None:
        self.listed, self.place = list(listed), 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < len(self.listed):
            self.place += 1
            yield self.item(self.listed[self.place - 1])

    def item(self, number: int) -> Any:
        return sample(number)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "of a kind that JSON has not": np.int64(1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Listed(Placed):
    """Begins each epoch anew, also after a break."""

    def set_epoch(self, epoch: int) -> None:
        self.place = 0


class Rewinding(Placed):
    """Stands at the first row again at the end of an epoch."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        self.place = 0


class Joined:
    """Batches of another iterable with a state."""

    def __init__(self, source: Placed, rows: int) -> None:
        self.source, self.rows = source, rows
        self.state_dict, self.load_state_dict = source.state_dict, source.load_state_dict
        if isinstance(source, Listed):
            self.set_epoch = source.set_epoch

    def __iter__(self) -> Iterator[Any]:
        rows = iter(self.source)
        while batch := list(islice(rows, self.rows)):
            yield default_collate(batch)


def dealt(epoch: int, shard: int, num_shards: int) -> Iterator[Any]:
    """A shard of 41 samples, in an order of its own each round."""
    order = np.random.default_rng(epoch).permutation(41)
    yield from (sample(int(number)) for number in order[shard::num_shards])


def unequal(shard: int, num_shards: int) -> Iterator[Any]:
    """Shard s has 3s rows."""
    yield from (sample(100 * shard + number) for number in range(3 * shard))


def tells_its_process(folder: str, shard: int, num_shards: int) -> Iterator[Any]:
    """A shard of 400 samples; a file with its number holds the process that reads it."""
    Path(folder, f"{shard}").write_text(str(os.getpid()))
    yield from (sample(number) for number in range(shard, 400, num_shards))


def fails(shard: int, num_shards: int) -> Iterator[Any]:
    """Shard 1 raises an error after its first sample."""
    yield sample(shard)
    if shard == 1:
        raise OSError("the disk is gone")


def of_a_set(shard: int, num_shards: int) -> Iterator[Any]:
    """A shard of 100 samples, in the order that a set of names has in this process."""
    names = {f"file {number}" for number in range(100)}
    return (sample(int(name[5:])) for name in [*names][shard::num_shards])


class Scaled:
    """An iterable that its user changes between epochs."""

    def __init__(self) -> None:
        self.factor = 1

    def __iter__(self) -> Iterator[dict[str, int]]:
        return ({"x": self.factor * number} for number in range(4))


class ViewsAndLocals:
    """Its rows hold what plain pickles refuse."""

    def __init__(self) -> None:
        class Pair(NamedTuple):
            number: Any
            text: Any

        self.pair, self.view = Pair, memoryview(array("d", [0.5, 1.5, 2.5, 3.5]))

    def __call__(self, shard: int, num_shards: int) -> Iterator[dict[str, Any]]:
        for index in range(shard, 4, num_shards):
            yield {"x": self.view[index], "y": self.view[index:], "pair": self.pair(index, f"text {index}")}


class Batched:
    """Batches by index that end only by their number, as datasets of PyTorch may: {"n": int64 [3]}."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return {"n": np.arange(3) + 3 * index}


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
    """What a loader gives after another one was stopped after `cut` batches, by the state that a checkpoint has."""
    stopped = from_iterable(make(), **options)
    taken(stopped, cut)
    state = json.loads(json.dumps(stopped.state_dict()))
    stopped.close()
    again = from_iterable(make(), **options)
    again.load_state_dict(state)
    return taken(again, count)
