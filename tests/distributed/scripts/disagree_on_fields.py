"""Two ranks whose batches differ: `disagree_on_fields.py FOLDER`. Each rank writes what it was told of each case."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import numpy as np
import oneflow as flow

from libai_data import DataLoader
from libai_data.data.samplers import CyclicSampler
from libai_data.delivery import to_global
from libai_data.errors import SchemaError
from libai_data.mesh.current import set_mesh
from libai_data.mesh.parallel_mesh import ParallelMesh
from libai_data.structures import DistTensorData

RANK = flow.env.get_rank()
X, Y = np.zeros((2, 4), np.float32), np.zeros((2, 4), np.int64)


class Samples:
    """Eight samples of the given fields."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.fields)


class LongerLater(Samples):
    """Sequences that get longer on rank 1 alone, in the second epoch."""

    reads = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        return {"tokens": np.zeros(5 if RANK == 1 and self.reads > 4 else 3)}


def stacked(samples: Any) -> dict[str, Any]:
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def listed(samples: Any) -> dict[str, Any]:
    """As in object detection: a list with an entry for each sample, of its own number of rows."""
    return {"x": np.stack([sample["x"] for sample in samples]), "boxes": [{"box": sample["box"]} for sample in samples]}


def of_views(samples: Any) -> dict[str, Any]:
    return {"views": [np.stack([sample["x"] for sample in samples])] * 2}


def batches_of(dataset: Any, collate_fn: Any = None) -> Iterator[Any]:
    sampler = CyclicSampler(dataset, 2, data_parallel_rank=RANK, data_parallel_size=2)
    return iter(DataLoader(dataset, sampler, collate_fn=collate_fn))


def grow_later() -> None:
    batches = batches_of(LongerLater(), collate_fn=stacked)
    for _ in range(2):
        to_global(next(batches))
    to_global(next(batches))


def on_one_rank(rank: int, odd: Any, usual: Any) -> Any:
    return odd if rank == RANK else usual


BOTH = {"x": X, "y": Y}
CASES: dict[str, Callable[[], Any]] = {
    "agree": lambda: to_global(BOTH),
    "missing on rank 0": lambda: to_global(on_one_rank(0, {"x": X}, BOTH)),
    "missing on rank 1": lambda: to_global(on_one_rank(1, {"x": X}, BOTH)),
    "other name on rank 1": lambda: to_global(on_one_rank(1, {"x": X, "z": Y}, BOTH)),
    "no fields on rank 1": lambda: to_global(on_one_rank(1, {}, BOTH)),
    "other order on rank 1": lambda: to_global(on_one_rank(1, {"y": Y, "x": X}, BOTH)),
    "other dtype on rank 1": lambda: to_global({"x": X, "y": on_one_rank(1, Y.astype(np.int32), Y)}),
    "other shape on rank 0": lambda: to_global({"x": X, "y": on_one_rank(0, Y[:, :3], Y)}),
    "more rows on rank 1": lambda: to_global({"x": X, "y": on_one_rank(1, np.repeat(Y, 2, axis=0), Y)}),
    "other signature on rank 1": lambda: to_global(
        {"x": DistTensorData(X, on_one_rank(1, ["split_0", "split_1"], ["split_0", "broadcast"]))}
    ),
    "other layer on rank 1": lambda: to_global({"x": DistTensorData(X, placement_idx=on_one_rank(1, -1, 0))}),
    "strings on rank 1 alone": lambda: to_global(on_one_rank(1, {**BOTH, "z": ["a", "b"]}, BOTH)),
    "strings and numbers": lambda: to_global({"x": X, "y": on_one_rank(1, ["a", "b"], Y)}),
    "first batch of a loader": lambda: to_global(
        next(batches_of(Samples(x=X[0], y=on_one_rank(1, Y[0].astype(bool), Y[0]))))
    ),
    "third batch of a collator": grow_later,
    "an entry for each sample": lambda: to_global(
        next(batches_of(Samples(x=X[0], box=np.zeros((3, 4))), collate_fn=listed))
    ),
    "an entry for each view": lambda: to_global(next(batches_of(Samples(x=X[0]), collate_fn=of_views))),
    "agree again": lambda: to_global(BOTH),
}


def main() -> None:
    set_mesh(ParallelMesh(2, 1, 1, rank=RANK))
    told = {}
    for name, case in CASES.items():
        try:
            case()
            told[name] = "agreed"
        except SchemaError as error:
            told[name] = str(error)
    Path(sys.argv[1], f"{RANK}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
