"""Logs a local loss of each rank and a global one; rank 0 notes what was logged: `local_losses.py FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

import oneflow as flow

from libai_data.engine.events import EventStorage
from libai_data.engine.losses import LossBuffer
from libai_data.mesh.current import get_rank

whole = flow.ones(1, placement=flow.placement("cpu", [0, 1]), sbp=[flow.sbp.broadcast])
losses, storage = LossBuffer(), EventStorage()
for step in range(2):
    losses.add(step, {"a_loss": flow.tensor([2.0 * get_rank() + step]), "b_loss": whole, "scores": flow.ones(2)})
losses.read_into(storage)
if get_rank() == 0:
    Path(sys.argv[1]).write_text(repr({name: history.values() for name, history in storage.histories().items()}))
