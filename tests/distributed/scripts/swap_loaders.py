"""Uses two loaders in turn, in another order on rank 1 from a step on: `swap_loaders.py READERS STEP`.

The loaders have the same order, so their batches have the same places, and only the samples differ.
"""

from __future__ import annotations

import sys

import numpy as np
import oneflow as flow

from libai_data import DataLoader, to_global

READERS, STEP = sys.argv[1], int(sys.argv[2])


def loader(first: int) -> DataLoader:
    samples = [{"x": np.full(1, number, np.float32)} for number in range(first, first + 40)]
    return DataLoader(samples, global_batch_size=8, shuffle=True, seed=1, readers=READERS)


for step, batches in enumerate(zip(loader(0), loader(1000))):
    used = batches[::-1] if step >= STEP and flow.env.get_rank() == 1 else batches
    for batch in used:
        x = to_global(batch)["x"].to_global(sbp=flow.sbp.broadcast).to_local().numpy()
        # Rows of both datasets in one batch are what the error must prevent.
        assert len({bool(number >= 1000) for number in x.reshape(-1)}) == 1, f"step {step} has mixed rows: {x.tolist()}"
print("used all batches")
