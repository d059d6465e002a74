"""Ranks whose collectives differ, while none leaves: `wait_in_different_places.py CASE`. Rank 1 differs."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

import libai_data

import oneflow as flow  # isort: skip

CASE = sys.argv[1]
mesh = libai_data.init(device="cpu")
DIFFERS = mesh.rank == 1
SAMPLES = [{"x": np.full(8, index, np.float32)} for index in range(400)]


def loader(readers: str) -> Any:
    return libai_data.build_nlp_train_loader(SAMPLES, 2, num_workers=0, readers=readers)[0]


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
elif CASE in ("one step more", "one step less"):
    everyone = flow.placement("cpu", list(range(mesh.world_size)))
    model = flow.nn.Linear(8, 1).to_global(placement=everyone, sbp=flow.sbp.broadcast)
    if CASE == "one step more":
        batches = iter(libai_data.from_iterable(SAMPLES, 2, shuffle=True, check_every=3))
    else:
        batches = iter(loader("node"))
    for step in range(20):
        made = next(batches)
        if DIFFERS and step == 5 and CASE == "one step less":
            continue
        if DIFFERS and step == 5:
            libai_data.to_global(made)
        loss = model(libai_data.to_global(made)["x"]).sum()
        loss.backward()
        if CASE == "one step less":
            loss.to_global(sbp=flow.sbp.broadcast).to_local().item()
elif CASE == "slow":
    if DIFFERS:
        time.sleep(45)
    libai_data.synchronize()
print("at its end")
