"""Takes very many tiny batches, and makes many loaders, on each rank: `delivery_soak.py FOLDER READERS`.

Each rank writes `FOLDER/<rank>.json`: what it had in use at some points.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import numpy as np
import oneflow as flow

from libai_data.delivery import to_global
from libai_data.delivery.build import build_nlp_test_loader, build_nlp_train_loader
from libai_data.mesh.current import set_mesh
from libai_data.mesh.parallel_mesh import ParallelMesh
from tests.loader.streams import loader_threads

RANK = flow.env.get_rank()
BATCHES = 2000
LOADERS = 30


SAMPLES = [{"x": np.full(16, index, np.float32), "y": index} for index in range(1000)]


def in_use() -> dict[str, int]:
    """What would grow if something were not given back."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(loader_threads()),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "resident KiB": resident,
        "objects": len(gc.get_objects()),
    }


def main() -> None:
    world_size = flow.env.get_world_size()
    set_mesh(ParallelMesh(world_size, 1, 1, rank=RANK, num_nodes=flow.env.get_node_size()))
    found: dict[str, list[dict[str, int]]] = {"batches": [], "loaders": []}
    everyone = flow.placement("cpu", list(range(world_size)))
    loader, _, _ = build_nlp_train_loader(
        SAMPLES, 4, num_workers=2, readers=sys.argv[2], start_method="fork", check_every=50
    )
    for number, batch in zip(range(1, BATCHES + 1), loader):
        tensors = to_global(batch)
        if number % 10 == 0:
            tensors["y"].to_global(placement=everyone, sbp=flow.sbp.broadcast).numpy()
        if number % (BATCHES // 4) == 0:
            found["batches"].append(in_use())
    loader.close()
    del loader, batch, tensors
    for number in range(LOADERS):
        readers = ("node", "rank0")[number % 2]
        loader = build_nlp_test_loader(SAMPLES, 250, num_workers=0, readers=readers)
        for batch in loader:
            to_global(batch)
        if number % 3:  # Some users never close theirs.
            loader.close()
        del loader, batch
        if number % 10 == 9:
            found["loaders"].append(in_use())
    Path(sys.argv[1], f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
