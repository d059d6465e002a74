"""Reads a streamed epoch on these ranks: `stream_shards.py FOLDER OUTPUT.json DATA,... READERS,...`.

Each epoch is stopped after half of it, and resumed. Rank 0 writes the rows of each global batch.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import oneflow as flow

from libai_data import DataLoader
from libai_data.data.sources import open_source
from libai_data.delivery import to_global
from libai_data.mesh.current import ParallelMesh, set_mesh


class Numbers:
    """Samples of a streamed source."""

    def __init__(self, folder: str) -> None:
        self.source = open_source(folder, streaming=True)
        self.shard_lengths = self.source.shard_lengths

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        return {"x": np.array(self.source[number]["x"])}


def main() -> None:
    rank, size = flow.env.get_rank(), flow.env.get_world_size()
    results: dict[str, Any] = {}
    for data in map(int, sys.argv[3].split(",")):
        set_mesh(None)
        set_mesh(ParallelMesh(data, size // data, 1, rank=rank))
        for readers in sys.argv[4].split(","):
            arguments: dict[str, Any] = {"shuffle": True, "seed": 3, "lanes": 4, "block": 2, "readers": readers}
            taken, state = [], {}
            loader = DataLoader(Numbers(sys.argv[1]), global_batch_size=8, num_workers=1, **arguments)
            for number, batch in enumerate(loader):
                taken.append(to_global(batch)["x"].numpy().tolist())
                if number == 9:
                    state = loader.state_dict()
                    break
            loader.close()
            loader = DataLoader(Numbers(sys.argv[1]), global_batch_size=8, **arguments)
            loader.load_state_dict(state)
            taken += [to_global(batch)["x"].numpy().tolist() for batch in loader]
            loader.close()
            results[f"{data} {readers}"] = taken
    if rank == 0:
        with open(sys.argv[2], "w") as file:
            json.dump(results, file)


main()
