"""Resumes from states of other data on a mesh, and in trainings: `resume_changed_data.py FOLDER MESH`.

Each rank writes `FOLDER/<rank>.json`: kind of data, change and read mode -> the numbers of its samples in the next
batches, or the error; and "trainings" -> change -> error. The change "the same" is none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Callable, NamedTuple

import numpy as np
import oneflow as flow

from libai_data.delivery import to_global
from libai_data.errors import CheckpointError, DataPipelineError, error_text
from libai_data.iterables import from_iterable
from libai_data.mesh.current import get_mesh, set_mesh, synchronize
from libai_data.mesh.parallel_mesh import ParallelMesh
from tests.engine.data_runs import config_of, train
from tests.engine.tiny import TinyDataset

READERS = ("every_rank", "node", "rank0")
GLOBAL_BATCH, SIZE, TAKEN = 4, 40, 3
REVERSED = tuple(range(SIZE - 1, -1, -1))


class Change(NamedTuple):
    """The data after a change."""

    numbers: tuple[int, ...] = tuple(range(SIZE))
    factor: int = 1
    has_new_field: bool = False

    def sample(self, place: int) -> dict[str, Any]:
        sample = {"x": np.full(3, self.factor * self.numbers[place], np.float32), "number": self.numbers[place]}
        return {**sample, "new": np.zeros(2, np.float32)} if self.has_new_field else sample


CHANGES = {
    "the same": Change(),
    "grew": Change(tuple(range(SIZE + 6))),
    "shrank": Change(tuple(range(SIZE - 6))),
    "reordered": Change(REVERSED),
    "a field added": Change(has_new_field=True),
    "another transform": Change(factor=2),
    "grew at the front": Change(tuple(range(-1, SIZE))),
}


class ByIndex:
    """A dataset that says nothing about its content."""

    def __init__(self, change: Change) -> None:
        self.change = change

    def __len__(self) -> int:
        return len(self.change.numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.change.sample(index)


class Named(ByIndex):
    """A dataset that has a fingerprint."""

    def fingerprint(self) -> str:
        return repr(self.change)


class Placed:
    """An iterable that continues where its state says."""

    place = 0

    def __init__(self, change: Change) -> None:
        self.change = change

    def set_epoch(self, epoch: int) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.place < len(self.change.numbers):
            self.place += 1
            yield self.change.sample(self.place - 1)

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def replayed(change: Change) -> Callable[[], Iterator[dict[str, Any]]]:
    """A stream without a state, which is read again from its beginning."""

    def rows() -> Iterator[dict[str, Any]]:
        return (change.sample(place) for place in range(len(change.numbers)))

    return rows


def by_index(kind: Any, **options: Any) -> Callable[..., Any]:
    return lambda change, **more: from_iterable(kind(change), micro_batch(), shuffle=True, seed=3, **options, **more)


KINDS: dict[str, Callable[..., Any]] = {
    "by index": by_index(ByIndex),
    "by index, hashed": by_index(ByIndex, content_hash=16),
    "by index, named": by_index(Named),
    "with a state": lambda change, **more: from_iterable(Placed(change), micro_batch(), **more),
    "replayed": lambda change, **more: from_iterable(replayed(change), micro_batch(), **more),
}


def micro_batch() -> int:
    return GLOBAL_BATCH // get_mesh().data_parallel_size


def state_of(make: Callable[..., Any]) -> Any:
    loader = make(CHANGES["the same"])
    for _ in islice(iter(loader), TAKEN):
        pass
    state = json.loads(json.dumps(loader.state_dict()))
    loader.close()
    return state


def resumed(make: Callable[..., Any], change: Change, state: Any, readers: str) -> Any:
    loader = make(change, readers=readers)
    try:
        loader.load_state_dict(state)
        found = []
        for batch in islice(iter(loader), 2):
            found.append(batch["number"].numpy().tolist())
            to_global(batch)
        return found
    except DataPipelineError as error:
        return error_text(error)
    finally:
        loader.close()


class WithExtra(TinyDataset):
    """The dataset of the tiny training, with one more field."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        sample.set("extra", np.zeros(2, np.float32))
        return sample


def trained(folder: Path, **dataset: Any) -> str:
    """The error of a training on changed data; "" if it continues."""
    cfg = config_of(folder, train_iter=8)
    cfg.dataloader.train.dataset.update(dataset)
    try:
        train(cfg, resume=True).train_loader.close()
    except CheckpointError as error:
        return error_text(error)
    return ""


def in_trainings(folder: Path) -> dict[str, str]:
    train(config_of(folder / "run", train_iter=8), stop_after=3).train_loader.close()
    synchronize()
    found = {
        "grew": trained(folder / "run", length=46),
        "shrank": trained(folder / "run", length=34),
        "a field added": trained(folder / "run", _target_="tests.distributed.scripts.resume_changed_data.WithExtra"),
    }
    set_mesh(None)
    return found


def main() -> None:
    folder, rank = Path(sys.argv[1]), flow.env.get_rank()
    data, tensor, pipeline = map(int, sys.argv[2].split("x"))
    found: dict[str, Any] = {}
    set_mesh(ParallelMesh(data, tensor, pipeline, rank=rank))
    for kind, make in KINDS.items():
        state = state_of(make)
        for name, change in CHANGES.items():
            for readers in READERS:
                found[f"{kind}, {name}, {readers}"] = resumed(make, change, state, readers)
                synchronize()
    set_mesh(None)
    found["trainings"] = in_trainings(folder)
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
