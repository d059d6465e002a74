"""The checks of the doctor: each collects facts on one rank, and then judges the facts of all ranks.

They compare packages, configs, datasets and reading speed of all ranks, check that the nodes fit the mesh, and whether
each rank has the memory and the file descriptors that the training needs.
"""

from __future__ import annotations

import importlib.metadata
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Callable, NamedTuple

import numpy as np

from libai_data.commands.doctor.rank import Examined
from libai_data.commands.doctor.reports import OK, RED, WARNING, Facts, Finding, Reports
from libai_data.commands.inspection.step_rows import read_step
from libai_data.config import try_get_key
from libai_data.data.attributes import has_attribute
from libai_data.delivery.read_plan import ReadPlan
from libai_data.delivery.same_values import differences
from libai_data.engine.agreement import config_values, hash_of_values, mesh_warnings, needed_versions
from libai_data.errors import bytes_in_words, numbers_in_words
from libai_data.loader.failures import ErrorPolicy
from libai_data.loader.reading import SampleReader
from libai_data.loader.same_dataset import fingerprint_with_samples
from libai_data.loader.shared_arguments import PREFETCH
from libai_data.mesh.parallel_mesh import ParallelMesh

PACKAGES, CONFIG, MESH, PLACE, DATASET, STORAGE = "packages", "config", "mesh", "place", "dataset", "storage"
MEMORY, LIMITS = "shared memory", "limits"

_HOSTS_NAMED = 8
_SAMPLES_HASHED = 4
_SECONDS, _MOST_SAMPLES = 0.5, 2000
_SLOW = 10.0  # a rank that is this many times slower than the median gets a warning
_SLOTS_BESIDE_PREFETCHED = 3  # for the batch that the model uses, the batch that is asked for, and one that is kept
_SHARED_MEMORY = "/dev/shm"
_LEAST_FOR_NCCL = 1 << 30
_DESCRIPTORS_OF_A_RANK, _DESCRIPTORS_OF_A_WORKER = 256, 8
_GROUPS = Path("/sys/fs/cgroup")


def examine_packages(examined: Examined) -> Facts:
    """Find the versions of the required packages, and of all other installed packages."""
    needed = needed_versions()
    # A distribution whose metadata is broken has no name.
    installed = {str(each.metadata["Name"]).lower(): each.version for each in importlib.metadata.distributions()}
    others = {name: version for name, version in installed.items() if name not in {each.lower() for each in needed}}
    return {"needed": needed, "others": others}


def judge_packages(reports: Reports) -> list[Finding]:
    facts = reports.facts(PACKAGES)
    needed = differences({rank: each["needed"] for rank, each in facts.items()})
    others = differences({rank: each["others"] for rank, each in facts.items()})
    found = []
    if needed:
        advice = "install the same versions on all nodes, or start them from one image"
        found.append(Finding(RED, "; ".join(needed), advice))
    if others:
        advice = "harmless unless the dataset or the model uses these packages"
        found.append(Finding(WARNING, "; ".join(others), advice))
    if found or not facts:
        return found
    first = next(iter(facts.values()))
    words = ", ".join(f"{name} {first['needed'][name]}" for name in ("python", "libai_data", "oneflow", "numpy"))
    return [Finding(OK, f"{words}; {len(first['others'])} others")]


def examine_config(examined: Examined) -> Facts:
    return {"values": config_values(examined.cfg)}


def judge_config(reports: Reports) -> list[Finding]:
    advice = "copy the same config files to all nodes, and give the same overrides"
    return _judged(reports.facts(CONFIG), advice, lambda values: f"hash {hash_of_values(values)}")


def _judged(facts: Mapping[int, Facts], advice: str, in_words: Callable[[Any], str]) -> list[Finding]:
    """Compare the "values" of the ranks; if all are equal, the finding is `in_words` of the values."""
    values = {rank: each["values"] for rank, each in facts.items()}
    found = differences(values)
    if found:
        return [Finding(RED, "; ".join(found), advice)]
    return [Finding(OK, in_words(each)) for each in list(values.values())[:1]]


def examine_dataset(examined: Examined) -> Facts:
    """The dataset's length, fingerprint and hash of some samples; nothing if this rank does not read."""
    if not examined.reads or not has_attribute(examined.dataset, "__len__"):
        return {}
    length = len(examined.dataset)
    fingerprint = fingerprint_with_samples(examined.dataset, min(_SAMPLES_HASHED, length))
    fingerprint[f"hash of {min(_SAMPLES_HASHED, length)} samples"] = fingerprint.pop("samples", "")
    return {"values": {"length": f"{length:,}", **{name: str(value) for name, value in fingerprint.items()}}}


def judge_dataset(reports: Reports) -> list[Finding]:
    facts = reports.facts(DATASET)
    advice = "copy the data to all nodes again, or let one rank read for all: dataloader.train.readers=rank0"

    def in_words(values: Mapping[str, str]) -> str:
        return f"{', '.join(f'{name} {value}' for name, value in values.items())}; {len(facts)} rank(s) read"

    return _judged(facts, advice, in_words)


def examine_place(examined: Examined) -> Facts:
    return {"local_rank": examined.job.local_rank, "host": socket.gethostname()}


def examine_mesh(examined: Examined) -> Facts:
    mesh = examined.mesh
    return {"sizes": [mesh.data_parallel_size, mesh.tensor_parallel_size, mesh.pipeline_parallel_size]}


def judge_mesh(reports: Reports) -> list[Finding]:
    """Check the mesh of the whole job; each rank reported only its local rank and host."""
    places, facts = reports.facts(PLACE), reports.facts(MESH)
    if not facts or len(places) < reports.world_size:
        return []
    sizes, num_nodes = next(iter(facts.values()))["sizes"], reports.num_nodes
    hosts = Counter(each["host"] for each in places.values())
    ranks_per_node = reports.world_size // num_nodes
    is_uneven = any(each["local_rank"] != rank % ranks_per_node for rank, each in places.items())
    if reports.world_size % num_nodes or is_uneven:
        words = f"the nodes have different numbers of ranks ({_listed([f'{host}: {hosts[host]}' for host in hosts])})"
        return [Finding(RED, words, "start the same number of ranks on each node")]
    mesh = ParallelMesh(sizes[0], sizes[1], sizes[2], num_nodes=num_nodes)
    warnings = [Finding(WARNING, *warning.split(". ", 1)) for warning in mesh_warnings(mesh)]
    words = f"{mesh.sizes_in_words} on {num_nodes} node(s) of {ranks_per_node} ({_listed(list(hosts))})"
    return warnings or [Finding(OK, words)]


def _listed(hosts: list[str]) -> str:
    return ", ".join(hosts[:_HOSTS_NAMED]) + (", ..." if len(hosts) > _HOSTS_NAMED else "")


def examine_storage(examined: Examined) -> Facts:
    """Measure how many samples per second one process reads, for up to 0.5 s; nothing if this rank does not read."""
    if not examined.reads or not has_attribute(examined.dataset, "__len__"):
        return {}
    reader = SampleReader(examined.dataset, 0, ErrorPolicy("raise", None))
    indices = np.random.default_rng(0).integers(0, len(examined.dataset), _MOST_SAMPLES).tolist()
    start, count = time.perf_counter(), 0
    while count < _MOST_SAMPLES and time.perf_counter() - start < _SECONDS:
        reader.sample(0, indices[count])
        count += 1
    return {"samples/s": count / (time.perf_counter() - start)}


def judge_storage(reports: Reports) -> list[Finding]:
    """Compare the ranks' rates. The rate that is fast enough depends on the model, but all ranks should be similar."""
    rates = {rank: float(each["samples/s"]) for rank, each in reports.facts(STORAGE).items()}
    if not rates:
        return []
    usual, least = median(rates.values()), min(rates.values())
    slow = [rank for rank, rate in rates.items() if rate < usual / _SLOW]
    if not slow:
        return [Finding(OK, f"one process reads {least:,.0f} samples/s, on the slowest rank")]
    words = f"rank {numbers_in_words(slow)} reads {least:,.0f} samples/s, but {usual:,.0f} samples/s are usual"
    advice = "all ranks wait for the slowest: look at its node's disk and network, or copy the data there"
    return [Finding(WARNING, words, advice)]


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


class Check(NamedTuple):
    """A check: `examine` collects facts on one rank, and `judge` makes findings from the facts of all ranks."""

    name: str
    examine: Callable[[Examined], Facts]
    judge: Callable[[Reports], list[Finding]]


CHECKS = (
    Check(PLACE, examine_place, lambda reports: []),
    Check(PACKAGES, examine_packages, judge_packages),
    Check(CONFIG, examine_config, judge_config),
    Check(MESH, examine_mesh, judge_mesh),
    Check(DATASET, examine_dataset, judge_dataset),
    Check(STORAGE, examine_storage, judge_storage),
    Check(MEMORY, examine_memory, judge_memory),
    Check(LIMITS, examine_limits, judge_limits),
)
