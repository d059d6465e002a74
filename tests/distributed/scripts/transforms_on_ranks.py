"""Takes blended, filtered and packed streams on one mesh after the other: `transforms_on_ranks.py FOLDER LEGS`.

Each leg has another mesh, read mode or number of workers, and goes on from the state that the last one left. Each rank
writes `FOLDER/<rank>.json`: scenario -> for each leg, the fields of its own rows and its state.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any, Callable, NamedTuple

import oneflow as flow

from libai_data.data.datasets import BlendedDataset, FilteredDataset, PackedDataset
from libai_data.delivery import to_global
from libai_data.delivery.build import build_nlp_train_loader
from libai_data.mesh.current import ParallelMesh, get_mesh, set_mesh
from tests.data.samplers.transforms import Documents, Failing, is_even

GLOBAL_BATCH = 8
STEPS = 2
LENGTHS = [3, 9, 1, 14, 0, 6, 2, 8, 11, 5]


class Leg(NamedTuple):
    """A few steps."""

    mesh: tuple[int, int]
    readers: str
    workers: int


LEGS = [
    Leg((4, 1), "every_rank", 0),
    Leg((2, 2), "node", 1),
    Leg((1, 4), "rank0", 0),
    Leg((4, 1), "node", 0),
    Leg((2, 2), "every_rank", 1),
    Leg((4, 1), "rank0", 1),
]


def documents() -> Documents:
    return Documents(LENGTHS, random=True)


def fixed(length: int) -> Documents:
    return Documents([length] * 7)


SCENARIOS: dict[str, Callable[[], Any]] = {
    "blend": lambda: BlendedDataset([fixed(4)] * 3, [0.5, 0.3, 0.2], {40: [0, 1, 1]}),
    "measured": lambda: PackedDataset(documents(), 10),
    "whole, kept": lambda: PackedDataset(documents(), 16, cut=False, keep=is_even),
    "blend, packed": lambda: PackedDataset(BlendedDataset([documents(), documents()], [2, 1]), 10),
    "failing": lambda: PackedDataset(Failing(LENGTHS, [3, 8], random=True), 10),
    "failing, known": lambda: PackedDataset(Failing(LENGTHS, [3, 8]), 10, lengths=LENGTHS),
    "filter": lambda: FilteredDataset(fixed(4), [True, False, True, True, False, True, False]),
}


def rows_of(batch: Any) -> dict[str, list[Any]]:
    """The rows of each field."""
    return {name: value.tensor.numpy().tolist() for name, value in batch.get_fields().items()}


def loader_of(make: Callable[[], Any], ranks: int, readers: str, workers: int) -> Any:
    """The train loader of a scenario."""
    options: dict[str, Any] = {"on_error": "skip", "replacement_budget": 1.0}
    return build_nlp_train_loader(
        make(), GLOBAL_BATCH // ranks, num_workers=workers, seed=11, readers=readers, **options
    )[0]


def main() -> None:
    folder = Path(sys.argv[1])
    rank = flow.env.get_rank()
    found: dict[str, list[Any]] = {name: [] for name in SCENARIOS}
    states: dict[str, Any] = {}
    for leg in LEGS[: int(sys.argv[2])]:
        set_mesh(None)
        set_mesh(ParallelMesh(*leg.mesh, 1, rank=rank))
        for name, make in SCENARIOS.items():
            loader = loader_of(make, get_mesh().data_parallel_size, leg.readers, leg.workers)
            if name in states:
                loader.load_state_dict(json.loads(states[name]))
            taken = []
            for batch in islice(iter(loader), STEPS):
                taken.append(rows_of(batch))
                to_global(batch)
            states[name] = json.dumps(loader.state_dict())
            found[name].append([taken, states[name]])
            loader.close()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    print(f"RANK {rank} DONE", flush=True)


if __name__ == "__main__":
    main()
