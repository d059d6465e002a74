"""Streams until a step, and notes it: `stream_and_resume.py ADDRESS FOLDER READERS WORKERS STEPS`.

It resumes from `FOLDER/state.json` if that is there. Rank 0 appends to `FOLDER/taken` what each step was, and each rank
writes to `FOLDER/pids-RANK` its process id and those of its workers.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow

from libai_data import DataLoader
from libai_data.atomic_files import written_whole
from libai_data.data.sources import open_source
from libai_data.delivery import to_global
from libai_data.engine.failure import end_job_on_failure
from libai_data.mesh.current import set_mesh
from libai_data.mesh.parallel_mesh import ParallelMesh
from libai_data.mesh.peers.liveness import say_farewell, watch_over_ranks

BATCH = 8
ORDER: dict[str, Any] = {"shuffle": True, "seed": 3, "lanes": 4, "block": 2}


class Records:
    """Samples of a source: numbers and noise."""

    def __init__(self, source: Any) -> None:
        self.source, self.shard_lengths = source, source.shard_lengths

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        record = self.source[number]
        return {"x": np.array(record["x"]), "noise": np.frombuffer(record["noise"], np.uint8)}


def digest_of(x: np.ndarray, noise: np.ndarray) -> str:
    """Of the rows of a global batch."""
    return hashlib.blake2b(x.astype(np.int64).tobytes() + noise.tobytes(), digest_size=16).hexdigest()


def stream(address: str, folder: Path, readers: str, workers: int, steps: int, rank: int) -> None:
    """Take the steps from where the state is on, up to this one."""
    dataset = Records(open_source(address, streaming=True))
    loader = DataLoader(dataset, global_batch_size=BATCH, num_workers=workers, readers=readers, **ORDER)
    state = folder / "state.json"
    step = 0
    if state.exists():
        step, saved = json.loads(state.read_text())
        loader.load_state_dict(saved)
    for batch in chain.from_iterable(repeat(loader)):
        own = getattr(loader, "_loader", loader)
        executor = getattr(getattr(own, "_reader", None), "_executor", None)
        with written_whole(folder / f"pids-{rank}") as part:
            part.write_text(json.dumps([os.getpid(), *getattr(executor, "pids", ())]))
        tensors = to_global(batch)
        digest = digest_of(tensors["x"].numpy(), tensors["noise"].numpy())
        step += 1
        saved = loader.state_dict()
        if rank == 0:
            with (folder / "taken").open("a") as file:
                file.write(f"{step - 1} {digest}\n")
            with written_whole(state) as part:
                part.write_text(json.dumps([step, saved]))
        if step == steps:
            break
    loader.close()


def main() -> None:
    rank, size = flow.env.get_rank(), flow.env.get_world_size()
    set_mesh(ParallelMesh(size, 1, 1, rank=rank, num_nodes=flow.env.get_node_size()))
    with end_job_on_failure(rank, size):
        watch_over_ranks()
        stream(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), rank)
        say_farewell()


if __name__ == "__main__":
    main()
