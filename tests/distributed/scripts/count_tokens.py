"""Each rank counts the tokens of its inputs, on meshes of each kind; rank 0 prints the counts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np

from libai_data.engine.token_count import TokenCounter
from libai_data.mesh import ParallelMesh, get_mesh, set_mesh
from libai_data.mesh.current import get_rank
from libai_data.structures import BatchInfo, DistTensorData

REAL = np.arange(16).reshape(8, 2) % 5 + 1  # tokens of two fields of each of eight samples
MESHES = ((4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2))


def counted(sizes: tuple[int, int, int]) -> list[int]:
    """Tokens by a mask for each token, and by a matrix for each sample, of two micro-batches; one has padding."""
    set_mesh(ParallelMesh(*sizes, rank=get_rank()))
    mesh = get_mesh()
    rows = np.split(REAL, mesh.data_parallel_size)[mesh.data_parallel_rank]
    counts = []
    for column, name in enumerate(("attention_mask", "encoder_attn_mask")):
        real = np.arange(6) < rows[:, column, None]
        mask = real if name == "attention_mask" else real[:, :, None] & real[:, None, :]
        tokens = "input_ids" if name == "attention_mask" else "encoder_input_ids"
        inputs = {}
        for field, value in ((tokens, np.zeros((len(rows), 6), np.int64)), (name, mask)):
            data = DistTensorData(value)
            data.to_global(device_type="cpu")
            inputs[field] = data.tensor
        counter = TokenCounter(SimpleNamespace(collates=True))
        counter.add(inputs)
        counter.add(inputs, [BatchInfo(step=1, epoch=0, position=8, size=8, valid=7)])
        counts.append(counter.take(16, 16)[1])
    return counts


found = [counted(sizes) for sizes in MESHES]
if get_rank() == 0:
    assert found == [(REAL.sum(axis=0) + REAL[:7].sum(axis=0)).tolist()] * len(MESHES), json.dumps(found)
    print("counted")
