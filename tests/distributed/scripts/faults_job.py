"""A small training job that fails in one of many ways: `faults_job.py CASE:RANK READERS WORKERS FOLDER`.

Just before something goes wrong, the time is written to `FOLDER/fault`. A rank that ends as planned says so.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow

from libai_data.config import LazyCall
from libai_data.data.samplers import CyclicSampler
from libai_data.delivery import to_global
from libai_data.delivery.build import build_nlp_train_loader
from libai_data.engine.failure import end_job_on_failure
from libai_data.mesh.current import get_mesh, set_mesh
from libai_data.mesh.parallel_mesh import ParallelMesh
from libai_data.mesh.peers.liveness import say_farewell, watch_over_ranks

CASE, WORKERS, FOLDER = sys.argv[1], int(sys.argv[3]), sys.argv[4]
READERS, _, START_METHOD = sys.argv[2].partition("+")
RANK = flow.env.get_rank()
WORLD_SIZE = flow.env.get_world_size()
FAULT_AT = 5
STEPS = 10
BROKEN = 45


def note_fault(folder: str) -> None:
    """Write down when the fault happens."""
    Path(folder, "fault").write_text(repr(time.time()))


class Samples:
    """400 samples, of which one may be broken."""

    def __init__(self, folder: str, broken: int) -> None:
        self.folder = folder
        self.broken = broken

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.broken:
            note_fault(self.folder)
            raise OSError(f"sample {index} cannot be read")
        return {"x": np.full(8, index, np.float32), "index": index}


def go_wrong(kind: str, loader: Any) -> None:
    """What happens on the rank that the case names."""
    note_fault(FOLDER)
    if kind == "raise":
        raise RuntimeError(f"the model of rank {RANK} is broken")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    if kind == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if kind == "exit":
        sys.exit(f"rank {RANK} has had enough")
    if kind == "hang":
        time.sleep(1000)
    if kind == "kill_worker":
        reader = getattr(loader, "_loader", loader)
        os.kill(reader._reader._executor.pids[0], signal.SIGKILL)


def train(kind: str, rank: str) -> None:
    loader, _, _ = build_nlp_train_loader(
        LazyCall(Samples)(folder=FOLDER, broken=BROKEN if kind == "dataset" else -1),
        8 // WORLD_SIZE,
        sampler=LazyCall(CyclicSampler)(shuffle=False),
        num_workers=WORKERS,
        readers=READERS,
        start_method=START_METHOD or "auto",
    )
    everyone = flow.placement("cpu", list(range(WORLD_SIZE)))
    total = 0.0
    for step, batch in zip(range(STEPS), loader):
        tensors = to_global(batch)
        if step == FAULT_AT and rank in (str(RANK), "each"):
            go_wrong(kind, loader)
        # As a training step does, it waits for all ranks.
        total += tensors["x"].to_global(placement=everyone, sbp=flow.sbp.broadcast).to_local().numpy().sum()
        time.sleep(0.02)
    loader.close()
    print(f"rank {RANK} ends as planned after {STEPS} steps: {total:g}")


def main() -> None:
    kind, _, rank = CASE.partition(":")
    set_mesh(ParallelMesh(WORLD_SIZE, 1, 1, rank=RANK, num_nodes=flow.env.get_node_size()))
    if kind == "absent" and rank == str(RANK):
        note_fault(FOLDER)
        time.sleep(1000)
    # A user's own loop has nothing around it.
    with nullcontext() if kind == "interrupt" else end_job_on_failure(RANK, WORLD_SIZE):
        watch_over_ranks()
        assert get_mesh().num_nodes == flow.env.get_node_size()
        train(kind, rank)
        say_farewell()


if __name__ == "__main__":
    main()
