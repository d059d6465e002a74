"""Changes the third batch of a loader on rank 1 in another way than on rank 0: `change_batches.py CHANGE READERS`."""

from __future__ import annotations

import sys

import numpy as np
import oneflow as flow

from libai_data import DataLoader, to_global

CHANGE, READERS = sys.argv[1:]
IS_ODD = flow.env.get_rank() == 1
samples = [{"tokens": np.arange(8) + number, "label": number} for number in range(40)]
for step, batch in enumerate(DataLoader(samples, global_batch_size=8, readers=READERS)):
    batch["tokens"] = batch["tokens"][:, : 8 - step]  # A change that is the same on all ranks is no error.
    if step == 2 and CHANGE == "cut":  # as a program does that cuts padding
        batch["tokens"] = batch["tokens"][:, : 4 + IS_ODD]
    elif step == 2 and IS_ODD and CHANGE == "dtype":
        batch["tokens"] = batch["tokens"].to(flow.float64)
    elif step == 2 and IS_ODD and CHANGE == "drop":
        del batch["label"]
    tensors = to_global(batch)
    tensors["tokens"].to_global(sbp=flow.sbp.broadcast).to_local().numpy()
    if step == 2:
        print("used changed fields")
