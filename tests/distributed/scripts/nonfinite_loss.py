"""Trains on a NaN, then reads losses that are NaN in one copy; notes the errors: `nonfinite_loss.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import oneflow as flow

from libai_data.engine.events import EventStorage
from libai_data.engine.losses import LossBuffer
from libai_data.errors import NonFiniteLossError
from libai_data.mesh.current import get_rank
from tests.engine.test_nonfinite_loss import poisoned

folder = Path(sys.argv[1])
trainer = poisoned(folder, log_period=4)
try:
    trainer.train()
except NonFiniteLossError as error:
    (folder / f"rank{get_rank()}.txt").write_text(f"{trainer.iter} {error}")

local = flow.tensor([float("nan") if get_rank() == 1 else 1.0])
copies = flow.empty(1, placement=flow.placement("cpu", [0, 1]), sbp=[flow.sbp.broadcast])
copies.to_local().copy_(local)
for kind, loss in (("local", local), ("broadcast", copies)):
    losses = LossBuffer()
    losses.add(4, {"loss": flow.ones_like(loss)})
    losses.add(5, {"loss": loss})
    try:
        losses.read_into(EventStorage())
    except NonFiniteLossError as error:
        with open(folder / f"rank{get_rank()}.txt", "a") as file:
            file.write(f"\n{kind}: {error}")
