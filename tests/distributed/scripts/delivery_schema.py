"""Gives some ranks batches of other fields, in every read mode: `delivery_schema.py FOLDER`.

Each rank writes `FOLDER/<rank>.json`: case -> read mode -> the error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Callable

import numpy as np
import oneflow as flow

from libai_data.delivery import to_global
from libai_data.delivery.build import build_nlp_train_loader
from libai_data.errors import DataPipelineError
from libai_data.mesh.current import ParallelMesh, get_mesh, set_mesh
from libai_data.structures import DistTensorData, Instance, origin_of

RANK = flow.env.get_rank()
Fields = dict[str, np.ndarray]

CASES: dict[str, Callable[[Fields], Fields]] = {
    "a missing field": lambda fields: {"x": fields["x"]},
    "another order": lambda fields: {"y": fields["y"], "x": fields["x"]},
    "another dtype": lambda fields: {"x": fields["x"].astype(np.float64), "y": fields["y"]},
    "another shape": lambda fields: {"x": fields["x"][..., :5], "y": fields["y"]},
}


def error_of(change: Callable[[Fields], Fields], readers: str) -> str:
    """In the modes where several ranks read, the second half of them read other files; else the last rank has changed
    what it was given.
    """
    mesh = get_mesh()
    reads_otherwise = mesh.world_size // 2 <= RANK and (readers == "every_rank" or mesh.num_nodes > 1)
    dataset = [{"x": np.full(6, index, np.float32), "y": np.asarray(index)} for index in range(64)]
    if reads_otherwise and readers != "rank0":
        dataset = list(map(change, dataset))
    loader, _, _ = build_nlp_train_loader(dataset, 4, num_workers=0, readers=readers)
    batch = next(iter(loader))
    if mesh.world_size - 1 == RANK and (readers == "rank0" or (readers == "node" and mesh.num_nodes == 1)):
        changed = change({name: data.tensor.numpy() for name, data in batch.get_fields().items()})
        given, batch = batch, Instance()
        for name, array in changed.items():
            batch.set(name, DistTensorData(flow.from_numpy(np.array(array))))
        batch.attach(origin_of(given))
    try:
        to_global(batch)
    except DataPipelineError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        loader.close()
    return ""


def main() -> None:
    set_mesh(ParallelMesh(flow.env.get_world_size(), 1, 1, rank=RANK, num_nodes=flow.env.get_node_size()))
    found = {
        name: {readers: error_of(change, readers) for readers in ("every_rank", "node", "rank0")}
        for name, change in CASES.items()
    }
    Path(sys.argv[1], f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
