"""Checks whether a rank has the memory and the file descriptors that the training needs."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from libai_data.commands.doctor.rank import Examined
from libai_data.commands.doctor.reports import OK, RED, WARNING, Facts, Finding, Reports
from libai_data.commands.inspection.step_rows import read_step
from libai_data.config import try_get_key
from libai_data.delivery.read_plan import ReadPlan
from libai_data.errors import bytes_in_words
from libai_data.loader.shared_arguments import PREFETCH

MEMORY, LIMITS = "shared memory", "limits"

_SLOTS_BESIDE_PREFETCHED = 3  # for the batch that the model uses, the batch that is asked for, and one that is kept
_SHARED_MEMORY = "/dev/shm"
_LEAST_FOR_NCCL = 1 << 30
_DESCRIPTORS_OF_A_RANK, _DESCRIPTORS_OF_A_WORKER = 256, 8
_GROUPS = Path("/sys/fs/cgroup")


def examine_memory(examined: Examined) -> Facts:
    """Measure the bytes that this rank's loader needs, and the memory of this machine."""
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
        slots += int(try_get_key(examined.cfg, "dataloader.train.prefetch", default=PREFETCH))
    shards = len(ReadPlan(mesh, examined.readers).shards_read_by(examined.job.rank)) or 1
    return int(sample) * opened.plan.first.micro_batch_size * shards * slots


def available() -> int:
    """Bytes of memory that are available: of the machine, or less if a container has a limit."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([free, *(max(left, 0) for left in _bytes_left_in_groups())])


def _bytes_left_in_groups() -> Iterator[int]:
    """Bytes that are left of each memory limit of this process's control groups, as set by a container or batch system.

    Linux's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst describe the files.
    """
    folders = {_GROUPS, _GROUPS / "memory"}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            folder = (_GROUPS / "memory" if controllers else _GROUPS) / path.lstrip("/")
            folders.update(each for each in (folder, *folder.parents) if _GROUPS in each.parents)
    for folder in folders:
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            if (folder / limit).is_file() and (most := (folder / limit).read_text().strip()).isdigit():  # or "max"
                yield int(most) - int((folder / used).read_text())


def judge_memory(reports: Reports) -> list[Finding]:
    """Compare the memory that the ranks of each node need with the memory that the node has."""
    facts = reports.facts(MEMORY)
    nodes: dict[int, list[Any]] = {}
    ranks_per_node = max(1, reports.world_size // reports.num_nodes)
    for rank, each in facts.items():
        nodes.setdefault(rank // ranks_per_node, []).append(each)
    found: list[Finding] = []
    for node, members in nodes.items():
        needed, has = sum(each["needed"] for each in members), min(each["available"] for each in members)
        words = f"node {node}: batches need {bytes_in_words(needed)} of {bytes_in_words(has)} available"
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
    words = f"batches need {bytes_in_words(needed)} per node, {bytes_in_words(has)} available"
    return [Finding(OK, f"{words}; {bytes_in_words(free)} free in /dev/shm")]


def examine_limits(examined: Examined) -> Facts:
    """The file descriptors that this process may open, and the number of its workers."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "descriptors": None if descriptors == resource.RLIM_INFINITY else descriptors,
        "workers": int(try_get_key(examined.cfg, "dataloader.train.num_workers", default=0) or 0),
    }


def judge_limits(reports: Reports) -> list[Finding]:
    """Compare with the descriptors that a rank needs; OneFlow connects each rank to every other rank."""
    facts = reports.facts(LIMITS)
    if not facts:
        return []
    workers = max(each["workers"] for each in facts.values())
    needed = _DESCRIPTORS_OF_A_RANK + reports.world_size + _DESCRIPTORS_OF_A_WORKER * workers
    allowed = {rank: each["descriptors"] for rank, each in facts.items() if each["descriptors"] is not None}
    if not allowed:
        return [Finding(OK, "any number of descriptors per rank")]
    rank, least = min(allowed.items(), key=lambda each: each[1])
    if least >= needed:
        return [Finding(OK, f"at least {least:,} descriptors per rank")]
    words = f"rank {rank} may open {least:,} descriptors; {reports.world_size} ranks need about {needed:,}"
    advice = f"ulimit -n {max(65536, needed)} before the launch, or LimitNOFILE= of the service that starts it"
    return [Finding(RED, words, advice)]
