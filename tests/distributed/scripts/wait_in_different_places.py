"""Ranks whose collectives differ, while none leaves: `wait_in_different_places.py CASE`. Rank 1 differs."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

import libai_data
from libai_data.config import LazyCall

import oneflow as flow  # isort: skip

CASE = sys.argv[1]
mesh = libai_data.init(device="cpu")
DIFFERS = mesh.rank == 1


class Samples:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.full(8, index, np.float32)}


def loader(readers: str) -> Any:
    return libai_data.build_nlp_train_loader(LazyCall(Samples)(), 2, num_workers=0, readers=readers)[0]


def batch() -> dict[str, Any]:
    return {"x": flow.ones(2, 3)}


if CASE == "read modes":
    libai_data.to_global(next(iter(loader("every_rank" if DIFFERS else "node"))))
elif CASE == "one batch more":
    batches = iter(loader("node"))
    for _ in range(20):
        made = next(batches)
        if not DIFFERS:
            libai_data.to_global(made)
elif CASE == "one to_global more":
    for _ in range(2 if DIFFERS else 1):
        libai_data.to_global(batch())
    libai_data.synchronize()
elif CASE == "slow":
    if DIFFERS:
        time.sleep(45)
    libai_data.synchronize()
print("at its end")
