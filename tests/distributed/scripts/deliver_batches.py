"""Delivers batches on some meshes and writes down what each rank got: `deliver_batches.py FOLDER MESH ...`.

Each rank writes `FOLDER/<rank>.json`: case -> mesh -> for each batch, for each field, the digest and shape
of the rank's own part, and on rank 0 those of the whole, gathered.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import oneflow as flow

from libai_data.data.samplers import CyclicSampler
from libai_data.delivery import to_global
from libai_data.delivery.build import build_nlp_train_loader
from libai_data.mesh.current import set_mesh, tensor_to_rank0
from libai_data.mesh.parallel_mesh import ParallelMesh
from tests.distributed.scripts.many_layouts import CASES, LAYOUTS, SEED, Case, ManyLayouts, digest


def describe(batch: Any) -> dict[str, Any]:
    tensors = to_global(batch)
    assert list(tensors) == list(LAYOUTS)
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        own = tensor.to_local().numpy()
        whole = tensor_to_rank0(tensor, to_local=True).numpy()
        found[name] = [digest(own) if own.size else None, digest(whole) if flow.env.get_rank() == 0 else None]
    return found


def deliver(case: Case, mesh: ParallelMesh) -> list[dict[str, Any]]:
    loader, _, _ = build_nlp_train_loader(
        ManyLayouts(),
        case.global_batch_size // mesh.data_parallel_size,
        num_workers=0,
        seed=SEED,
        readers=case.readers,
        check_every=1,
    )
    if case.position:
        # As saved by one of four data-parallel ranks with batches of 3.
        elsewhere = CyclicSampler(ManyLayouts(), 3, True, data_parallel_rank=1, data_parallel_size=4, seed=SEED)
        elsewhere.set_consumed_samples(case.position)
        loader.load_state_dict(json.loads(json.dumps(elsewhere.state_dict())))
    batches = iter(loader)
    found = [describe(next(batches)) for _ in range(case.steps)]
    loader.close()
    return found


def main() -> None:
    rank = flow.env.get_rank()
    found: dict[str, Any] = {}
    for name in sys.argv[2:]:
        data, tensor, pipeline = map(int, name.split("x"))
        mesh = ParallelMesh(data, tensor, pipeline, rank=rank)
        set_mesh(mesh)
        for case in CASES:
            found.setdefault(case.name, {})[name] = deliver(case, mesh)
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
