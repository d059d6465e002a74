"""Loads with workers of each kind on every rank, and compares with reading in the rank's own process."""

from __future__ import annotations

import os
import signal
from itertools import islice
from typing import Any

import numpy as np
import oneflow as flow

from libai_data.data.samplers import CyclicSampler
from tests.loader.sample_datasets import Describing, FlowTensors, Numbers, Slow
from tests.loader.streams import content, is_running, loading, worker_pids

RANK, WORLD_SIZE = flow.env.get_rank(), flow.env.get_world_size()
KINDS: list[dict[str, Any]] = [
    {"start_method": "spawn"},
    {"start_method": "fork"},
    {"worker_type": "thread"},
]


def sampler(dataset: Any) -> CyclicSampler:
    """This rank's part of global batches of 3 samples a rank."""
    return CyclicSampler(dataset, 3, True, 0, RANK, WORLD_SIZE, seed=7)


def contents(dataset: Any, batches: int, kill: bool = False, **arguments: Any) -> list[Any]:
    """The first batches; if `kill`, one worker is killed after each of the first five."""
    found = []
    with loading(dataset, sampler(dataset), **arguments) as loader:
        for step, batch in enumerate(islice(loader, batches)):
            found.append(content(batch))
            if kill and step < 5:
                os.kill(worker_pids(loader)[step % 2], signal.SIGKILL)
        pids = worker_pids(loader) if "start_method" in arguments else []
    assert not any(is_running(pid) for pid in pids)
    return found


def together() -> float:
    """A collective: shows that the ranks' own connections are as they were."""
    part = flow.ones(2, dtype=flow.float32).to_global(
        placement=flow.placement("cpu", list(range(WORLD_SIZE))), sbp=flow.sbp.split(0)
    )
    return float(part.sum().numpy())


def main() -> None:
    """Run all kinds one after the other."""
    assert together() == 2 * WORLD_SIZE
    expected = contents(Numbers(50), 30, num_workers=0)
    for kind in KINDS:
        assert contents(Numbers(50), 30, num_workers=2, **kind) == expected, kind
        assert together() == 2 * WORLD_SIZE
    assert contents(Slow(50, 0.002), 30, kill=True, num_workers=2, start_method="fork") == expected
    with loading(Describing(), sampler(Describing()), num_workers=2, start_method="spawn") as loader:
        assert not next(iter(loader)).has_oneflow.tensor.numpy().any()
    # A dataset that imports OneFlow gets a OneFlow of its own in the worker, which joins no job.
    for _, fields in contents(FlowTensors(50), 3, num_workers=1, start_method="spawn"):
        assert np.frombuffer(fields["job_variables"][2], np.int64).tolist() == [0, 0, 0]
        assert np.frombuffer(fields["world_size"][2], np.int64).tolist() == [1, 1, 1]
    assert together() == 2 * WORLD_SIZE
    print(f"rank {RANK} is done", flush=True)


if __name__ == "__main__":
    main()
