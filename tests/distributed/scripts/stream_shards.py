"""Reads a streamed epoch on these ranks: `stream_shards.py ADDRESS OUTPUT.json DATA,... READERS,... [KIND,...]`.

Each epoch is stopped after half of it, and resumed. Rank 0 writes the rows of each global batch.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from typing import Any

import numpy as np
import oneflow as flow

from libai_data import DataLoader
from libai_data.data.datasets import BlendedDataset, FilteredDataset, Map, PackedDataset, Subset
from libai_data.data.sources import open_source
from libai_data.delivery import to_global
from libai_data.mesh.current import set_mesh
from libai_data.mesh.parallel_mesh import ParallelMesh
from tests.distributed.scripts.stream_and_resume import ORDER

BATCHES = 20
"""Of an epoch of the source; of a stream without end as many."""


def number_of(record: Any) -> dict[str, np.ndarray]:
    """A sample."""
    return {"x": np.array(record["x"])}


def tokens_of(record: Any) -> dict[str, np.ndarray]:
    """A sequence of 2 to 4 tokens."""
    return {"input_ids": np.arange(record["x"], record["x"] + 2 + record["x"] % 3)}


def is_kept(sample: Any) -> bool:
    """Four of five samples: whole batches."""
    return bool(sample["x"] % 5)


def loader_of(kind: str, source: Any, **more: Any) -> DataLoader:
    """Batches of 8: "plain", in lanes; a "blend", "filter" or "packer", or a packer without lengths ("measured"); or in
    lanes too, as "blend-lanes", or as "filter-epochs"."""
    name, _, ends = kind.partition("-")
    numbers, half = Map(source, number_of), len(source) // 2
    dataset = {
        "plain": lambda: numbers,
        "blend": lambda: BlendedDataset([Subset(numbers, 0, half), Subset(numbers, half, 2 * half)], [3, 1]),
        "filter": lambda: FilteredDataset(numbers, is_kept),
        "packer": lambda: PackedDataset(Map(source, tokens_of), 8, lengths=[2 + x % 3 for x in range(len(source))]),
        "measured": lambda: PackedDataset(Map(source, tokens_of), 8),
    }[name]()
    order = ORDER if name == "plain" else {"shuffle": False}
    if ends:
        order = {**ORDER, "lanes": 2, "block": 1, "ends": {"lanes": "cycle", "epochs": "pad"}[ends]}
    return DataLoader(dataset, global_batch_size=8, **order, **more)


def rows_of(batch: Any) -> dict[str, Any]:
    """Each field of a global batch."""
    return {name: tensor.numpy().tolist() for name, tensor in to_global(batch).items()}


def main() -> None:
    rank, size = flow.env.get_rank(), flow.env.get_world_size()
    kinds = sys.argv[5] if len(sys.argv) > 5 else "plain"
    results: dict[str, Any] = {}
    for data in map(int, sys.argv[3].split(",")):
        set_mesh(None)
        set_mesh(ParallelMesh(data, size // data, 1, rank=rank, num_nodes=flow.env.get_node_size()))
        for readers in sys.argv[4].split(","):
            for kind in kinds.split(","):
                taken: list[Any] = []
                state: dict[str, Any] = {}
                loader = loader_of(kind, open_source(sys.argv[1], streaming=True), num_workers=1, readers=readers)
                for number, batch in enumerate(loader):
                    taken.append(rows_of(batch))
                    if number == 4:
                        state = loader.state_dict()
                        break
                loader.close()
                loader = loader_of(kind, open_source(sys.argv[1], streaming=True), readers=readers)
                loader.load_state_dict(state)
                taken += [rows_of(batch) for batch in islice(loader, BATCHES - 5)]
                loader.close()
                results[f"{data} {readers} {kind}"] = taken
    if rank == 0:
        with open(sys.argv[2], "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
