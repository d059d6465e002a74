"""Makes global tensors of each layout on three meshes of 4 ranks: `hold_parts.py FOLDER`.

Each rank writes `FOLDER/<rank>.json`: for each case the numbers that it should hold by `part_of`, and those it holds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import oneflow as flow

from libai_data.commands.inspection.fields import part_of, whole_shape
from libai_data.loader.schema import Layout
from libai_data.mesh.current import ParallelMesh, set_mesh
from libai_data.mesh.global_tensor import local_to_global

RANK = flow.env.get_rank()
SBP = ("split_0", "broadcast", "split_1")
ROWS, COLUMNS = 4, 8


def numbers(array: np.ndarray) -> list[int]:
    return [*array.shape, *array.reshape(-1).tolist()]


def main() -> None:
    found: dict[str, tuple[list[int], list[int]]] = {}
    for sizes in ((2, 2, 1), (4, 1, 1), (2, 1, 2)):
        mesh = ParallelMesh(*sizes, rank=RANK)
        set_mesh(mesh)
        whole = np.arange(ROWS * mesh.data_parallel_size * COLUMNS).reshape(-1, COLUMNS)
        shard = whole[ROWS * mesh.data_parallel_rank :][:ROWS].copy()
        for data in SBP:
            for tensor in SBP:
                layout = Layout((data, tensor), -1)
                part = part_of(whole_shape(ROWS, (COLUMNS,), layout, mesh), layout, mesh, RANK)
                held = local_to_global(shard, layout.sbp_list, layout.placement_idx).to_local().numpy()
                drawn = numbers(whole[part]) if part is not None else []
                found[f"{sizes} {data} {tensor}"] = drawn, numbers(held) if held.size else []
    Path(sys.argv[1], f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
