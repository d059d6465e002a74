"""Takes what `DataLoader` makes on four ranks: `data_loader_on_ranks.py OUTPUT.json`, each case on several meshes.

For each case and mesh rank 0 writes, batch by batch, the rows of the global batch and how many of them count.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, Callable

import oneflow as flow

from libai_data import DataLoader
from libai_data.data.datasets import FilteredDataset
from libai_data.delivery import to_global
from libai_data.mesh.current import set_mesh
from libai_data.mesh.parallel_mesh import ParallelMesh
from libai_data.structures import batch_info

SAMPLES = 22
WEIGHTS = [1] * 20 + [20, 0]
REPEATED = [7, *[3, 5] * 6]
MESHES = [(4, 1), (2, 2), (1, 4)]


class Unseeded:
    """Another order on each rank."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.SystemRandom().sample(range(SAMPLES), SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


class Shards:
    """The same samples, in shards."""

    shard_lengths = (3, 5, 4, 6, 4)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return samples()[index]


def samples() -> list[Any]:
    return [(number, {"name": str(number)}) for number in range(SAMPLES)]


def filtered() -> FilteredDataset:
    return FilteredDataset(samples(), lambda sample: sample[0] % 5 > 0)


def in_each_mode(name: str, make: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """A case in each read mode."""
    modes = {name: "every_rank", f"{name} by node": "node", f"{name} by rank 0": "rank0"}
    return {case: partial(make, readers=readers) for case, readers in modes.items()}


CASES: dict[str, Callable[..., Any]] = {
    **in_each_mode("shuffled", lambda **more: DataLoader(samples(), shuffle=True, seed=3, **more)),
    **in_each_mode("weighted", lambda **more: DataLoader(samples(), weights=WEIGHTS, seed=3, **more)),
    **in_each_mode("lanes", lambda **more: DataLoader(Shards(), shuffle=True, seed=3, lanes=4, block=2, **more)),
    **in_each_mode("filtered", lambda **more: DataLoader(filtered(), shuffle=True, seed=3, **more)),
    "sampled": lambda **more: DataLoader(samples(), sampler=[*range(0, SAMPLES, 2), 1, 3], **more),
    "repeated": lambda **more: DataLoader(samples(), sampler=REPEATED, **more),
    "unseeded": lambda **more: DataLoader(samples(), sampler=Unseeded(), **more),
    "dropped": lambda **more: DataLoader(samples(), sampler=Unseeded(), drop_last=True, **more),
}


def taken(loader: Any) -> list[Any]:
    found = []
    for batch in loader:
        info, (own, about) = batch_info(batch), batch
        assert info is not None
        assert about["name"] == [str(number) for number in own.numpy().tolist()]
        whole: Any = to_global(batch)
        x, _ = whole
        found.append([x.numpy().tolist(), info.valid, loader.state_dict()])
    return found


def main() -> None:
    rank = flow.env.get_rank()
    results: dict[str, Any] = {}
    for data, tensor in MESHES:
        set_mesh(None)
        set_mesh(ParallelMesh(data, tensor, 1, rank=rank))
        for name, make in CASES.items():
            loader = make(global_batch_size=8, fields=["x", "about"])
            results[f"{name} {data}x{tensor}"] = [taken(loader), taken(loader)]
            loader.close()
    if rank == 0:
        with open(sys.argv[1], "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
