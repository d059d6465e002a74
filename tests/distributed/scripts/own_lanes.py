"""Reads packs in lanes on four ranks, each its own lanes: `own_lanes.py FOLDER`.

Each rank writes `FOLDER/<rank>.json`: what the log shows on some meshes, and how faults of a single rank are named.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from libai_data import DataLoader
from libai_data.data.datasets import ConcatDataset, PackedDataset
from libai_data.delivery import to_global
from libai_data.engine.hooks import DataProgress
from libai_data.engine.token_count import TokenCounter
from libai_data.errors import DataPipelineError
from libai_data.mesh.current import get_rank, set_mesh
from libai_data.mesh.parallel_mesh import ParallelMesh
from libai_data.structures import batch_info

STEPS, PERIOD, CHECK_EVERY = 12, 4, 2
MESHES = {"4x1": [(4, 1)], "2x2": [(2, 2)], "4x1, then 2x2": [(4, 1), (2, 2)]}
READERS = ["every_rank", "node"]


class Documents:
    """Texts of 1 to 7 tokens in shards of 10; notes which are read, and may leave one empty."""

    def __init__(self, samples: int, name: str, empty: int | None) -> None:
        self.source, self.shard_lengths = SimpleNamespace(prefix=name), np.full(samples // 10, 10)
        self.lengths = [0 if index == empty else 1 + index * 5 % 7 for index in range(samples)]
        self.reads: set[int] = set()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        self.reads.add(index)
        return {"input_ids": np.arange(self.lengths[index])}


def packs(known: bool = False, empty: int | None = None) -> PackedDataset:
    """Packs of two corpora, of which the lengths may be known."""
    parts = [Documents(40, "web", empty), Documents(80, "books", None)]
    lengths = [*parts[0].lengths, *parts[1].lengths]
    return PackedDataset(ConcatDataset(parts), 8, lengths=lengths if known else None)


def loader_of(dataset: Any, ends: str = "cycle", **more: Any) -> DataLoader:
    return DataLoader(dataset, global_batch_size=8, shuffle=True, seed=1, lanes=4, block=2, ends=ends, **more)


def on_mesh(data: int, tensor: int) -> None:
    set_mesh(None)
    set_mesh(ParallelMesh(data, tensor, 1, rank=get_rank()))


def logged(runs: list[Callable[[], DataLoader]]) -> dict[str, Any]:
    """What the log shows of a training that loaders continue one after the other, and the epochs of its batches."""
    log: list[Any] = []
    epochs: list[Any] = []
    saved: dict[str, Any] = {}
    trainer: Any = SimpleNamespace(
        iter=-1,
        storage=SimpleNamespace(put_scalars=lambda smoothing_hint, **shown: log.append(shown), latest=dict),
        ends_period=lambda period: (trainer.iter + 1) % period == 0,
    )
    for run in runs:
        loader = run()
        counter = TokenCounter(loader)
        if saved:
            loader.load_state_dict(saved["loader"])
            counter.load_state_dict(saved["tokens"])
        progress = DataProgress(loader, 8, PERIOD, counter.take, lambda counter=counter: counter.sources)  # type: ignore[misc]
        progress.trainer, trainer.start_iter = trainer, trainer.iter + 1
        progress.before_train()
        for batch in islice(loader, STEPS // len(runs)):
            trainer.iter += 1
            inputs, info = to_global(batch), batch_info(batch)
            assert info is not None
            epochs.append(info.epoch)
            counter.add({name: inputs[name] for name in ("input_ids", "segment_ids")})
            progress.after_step()
        # In the order of a checkpoint.
        saved = {"loader": loader.state_dict(), "tokens": counter.state_dict()}
        loader.close()
    return {"log": log, "epochs": epochs, "saved": saved}


def logged_on(meshes: list[tuple[int, int]], readers: str) -> dict[str, Any]:
    """`logged` on these meshes, and how many documents this rank reads on the last one."""
    datasets = [packs() for _ in meshes]

    def begun(mesh: tuple[int, int], dataset: PackedDataset) -> DataLoader:
        on_mesh(*mesh)
        return loader_of(dataset, readers=readers)

    found = logged([lambda pair=pair: begun(*pair) for pair in zip(meshes, datasets)])  # type: ignore[misc]
    return {**found, "read": sum(len(part.reads) for part in datasets[-1].dataset.datasets)}


def resumed(change: Callable[[dict[str, Any]], None], known: bool = False, **more: Any) -> Iterator[Any]:
    """Batches from a state that rank 1 has changed."""
    on_mesh(4, 1)
    first = loader_of(packs(known), **more)
    for _ in islice(first, 3):
        pass
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    loader = loader_of(packs(known), check_every=CHECK_EVERY, **more)
    if get_rank() == 1:
        change(state)
    loader.load_state_dict(state)
    return iter(loader)


def read_on(state: dict[str, Any]) -> None:
    """A lane has taken one sample more."""
    state["start"][2] = [state["start"][2][0] + 4, 0]


def one_batch_back(state: dict[str, Any]) -> None:
    state["position"] -= 8


def emptied(mesh: tuple[int, int], known: bool, check_every: int = CHECK_EVERY, **more: Any) -> Iterator[Any]:
    """Batches without one of the documents on rank 3."""
    on_mesh(*mesh)
    loader = loader_of(packs(known, 7 if get_rank() == 3 else None), check_every=check_every, **more)
    yield from islice(loader, STEPS if check_every else 8)
    loader.state_dict()


def saved_later() -> Iterator[Any]:
    """A batch, before a state that rank 1 saves after one batch more."""
    on_mesh(4, 1)
    loader = loader_of(packs())
    yield from islice(loader, 1)
    if get_rank() == 1:
        next(iter(loader))
    loader.state_dict()


FAULTS: dict[str, Callable[[], Iterator[Any]]] = {
    "a foreign state": lambda: resumed(read_on),
    "a foreign state on a rank that does not read": lambda: resumed(read_on, readers="node"),
    "a foreign state, with lengths": lambda: resumed(read_on, known=True),
    "a foreign state in an epoch": lambda: resumed(read_on, ends="short"),
    "an older state": lambda: resumed(one_batch_back),
    "other lengths": lambda: emptied((4, 1), known=True),
    "another sample in an epoch": lambda: emptied((4, 1), known=False, ends="short"),
    "another sample on a tensor peer": lambda: emptied((2, 2), known=False),
    "another sample on a tensor peer, found when saving": lambda: emptied((2, 2), known=False, check_every=0),
    "a state that is saved a batch later": saved_later,
}


def named(batches: Iterator[Any]) -> tuple[int, str]:
    """At which step which error came; -1 if none did."""
    step = 0
    try:
        for step, batch in enumerate(batches):
            to_global(batch)
            if step == STEPS:
                break
    except DataPipelineError as error:
        return step, f"{type(error).__name__}: {error}"
    return -1, ""


def main() -> None:
    found: dict[str, Any] = {"logged": {}, "faults": {}}
    for readers in READERS:
        for name, meshes in MESHES.items():
            found["logged"][f"{readers} {name}"] = logged_on(meshes, readers)
    for name, plant in FAULTS.items():
        found["faults"][name] = named(plant())
    Path(sys.argv[1], f"{get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
