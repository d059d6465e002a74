"""Calls `init` with another mesh on each of two ranks, and loads a batch: `init_other_meshes.py`."""

from __future__ import annotations

import os

import libai_data  # isort: skip  # before oneflow

from libai_data import DataLoader, to_global

libai_data.init(tensor=1 + int(os.environ["RANK"]))
for batch in DataLoader([{"x": number} for number in range(8)], global_batch_size=4):
    to_global(batch)
