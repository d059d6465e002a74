"""Whether there is memory for the batches that are read ahead, and room in /dev/shm."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from libai_data.config import try_get_key
from libai_data.doctor.control_group import limit_left
from libai_data.doctor.examined import Examined
from libai_data.doctor.findings import OK, RED, WARNING, Facts, Finding, Reports
from libai_data.global_batch.plan import ReadPlan
from libai_data.in_words import bytes_in_words
from libai_data.inspection.step_rows import read_step

NAME = "shared memory"

_SLOTS_BESIDE_PREFETCHED = 3
"""Of the batch that the model has, the one that is asked for, and one that is kept."""

_USUAL_PREFETCH = 4
_SHARED_MEMORY = "/dev/shm"
_LEAST_FOR_NCCL = 1 << 30


def examine(examined: Examined) -> Facts:
    """Bytes that this rank's loader will hold, and what this machine has."""
    places = os.statvfs(_SHARED_MEMORY)
    return {
        "needed": _needed(examined) if examined.reads else 0,
        "available": available(),
        "free in /dev/shm": places.f_bavail * places.f_frsize,
        "GPUs": len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
    }


def _needed(examined: Examined) -> int:
    opened, mesh = examined.opened, examined.mesh
    rows = read_step(opened, "train", opened.loaders[0], 0, mesh.data_parallel_size, 1, rows=1)
    sample = sum(values[0].nbytes for values in rows.values.values())
    slots = _SLOTS_BESIDE_PREFETCHED
    if try_get_key(examined.cfg, "dataloader.train.num_workers", default=0):
        slots += int(try_get_key(examined.cfg, "dataloader.train.prefetch", default=_USUAL_PREFETCH))
    shards = len(ReadPlan(mesh, examined.readers).shards_read_by(examined.job.rank)) or 1
    return int(sample) * opened.plan.first.micro_batch_size * shards * slots


def available() -> int:
    """Bytes that can still be taken: of the machine, or of what a container may use of it."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    left = limit_left("memory", "memory.max", "memory.current", "memory.limit_in_bytes", "memory.usage_in_bytes")
    return free if left is None else min(free, max(left, 0))


def judge(reports: Reports) -> list[Finding]:
    """Compare what the ranks of each node need with what it has."""
    facts = reports.facts(NAME)
    nodes: dict[int, list[Any]] = {}
    ranks_per_node = max(1, reports.world_size // reports.num_nodes)
    for rank, each in facts.items():
        nodes.setdefault(rank // ranks_per_node, []).append(each)
    found: list[Finding] = []
    for node, members in nodes.items():
        needed, has = sum(each["needed"] for each in members), min(each["available"] for each in members)
        words = f"node {node}: batches take {bytes_in_words(needed)} of {bytes_in_words(has)} available"
        if needed > has:
            found.append(Finding(RED, words, "lower dataloader.train.prefetch or the batch size, or allow more memory"))
        elif 2 * needed > has:
            found.append(Finding(WARNING, words, "the model needs memory too; lower dataloader.train.prefetch"))
        free = min(each["free in /dev/shm"] for each in members)
        if free < _LEAST_FOR_NCCL and any(each["GPUs"] for each in members):
            advice = "NCCL keeps its buffers there: start the container with --shm-size=8g, or with --ipc=host"
            found.append(Finding(WARNING, f"node {node}: {bytes_in_words(free)} free in /dev/shm", advice))
    if found or not facts:
        return found
    needed = max(sum(each["needed"] for each in members) for members in nodes.values())
    has, free = (min(each[name] for each in facts.values()) for name in ("available", "free in /dev/shm"))
    return [
        Finding(
            OK,
            f"batches take {bytes_in_words(needed)} a node, {bytes_in_words(has)} available; "
            f"{bytes_in_words(free)} free in /dev/shm",
        )
    ]
