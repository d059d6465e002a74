"""Trains on a NaN, and notes on each rank what stops it: `nonfinite_loss.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from libai_data.errors import NonFiniteLossError
from libai_data.mesh.current import get_rank
from tests.engine.test_nonfinite_loss import poisoned

folder = Path(sys.argv[1])
trainer = poisoned(folder, log_period=4)
try:
    trainer.train()
except NonFiniteLossError as error:
    (folder / f"rank{get_rank()}.txt").write_text(f"{trainer.iter} {error}")
