"""Rank 0 leaves early, when rank 1 has begun all its collectives already: `leave_unnoticed.py FOLDER WHEN`.

With `later`, rank 1 ends when it knows that rank 0 has left, otherwise at once.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import oneflow as flow

from libai_data import from_iterable, to_global
from libai_data.mesh.peers.liveness import watch_over_ranks

DONE = Path(sys.argv[1], "done")
loader = from_iterable([{"x": np.float32(index)} for index in range(16)], 2)
for batch in loader:
    to_global(batch)
    if flow.env.get_rank() == 0:
        while not DONE.exists():
            time.sleep(0.01)
        sys.exit(0)
DONE.touch()
while sys.argv[2] == "later" and not watch_over_ranks()._leaving.after:
    time.sleep(0.01)
