"""Compares packages, configs, datasets and reading speed of all ranks, and checks that the nodes fit the mesh."""

from __future__ import annotations

import importlib.metadata
import socket
import time
from collections import Counter
from statistics import median

import numpy as np

from libai_data.commands.doctor.rank import Examined
from libai_data.commands.doctor.reports import OK, RED, WARNING, Facts, Finding, Reports
from libai_data.data.attributes import has_attribute
from libai_data.delivery.same_values import differences
from libai_data.engine.agreement import config_values, hash_of_values, mesh_warnings, needed_versions
from libai_data.errors import numbers_in_words
from libai_data.loader.failures import ErrorPolicy
from libai_data.loader.reading import SampleReader
from libai_data.loader.same_dataset import fingerprint_with_samples
from libai_data.mesh.parallel_mesh import ParallelMesh

PACKAGES, CONFIG, MESH, PLACE, DATASET, STORAGE = "packages", "config", "mesh", "place", "dataset", "storage"

_HOSTS_NAMED = 8
_SAMPLES_HASHED = 4
_SECONDS, _MOST_SAMPLES = 0.5, 2000
_SLOW = 10.0  # a rank that is this many times slower than the median gets a warning


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
    values = {rank: facts["values"] for rank, facts in reports.facts(CONFIG).items()}
    found = differences(values)
    if found:
        return [Finding(RED, "; ".join(found), "copy the same config files to all nodes, and give the same overrides")]
    return [Finding(OK, f"hash {hash_of_values(each)}") for each in list(values.values())[:1]]


def examine_dataset(examined: Examined) -> Facts:
    """The dataset's length, fingerprint and hash of some samples; nothing if this rank does not read."""
    if not examined.reads or not has_attribute(examined.dataset, "__len__"):
        return {}
    length = len(examined.dataset)
    fingerprint = fingerprint_with_samples(examined.dataset, min(_SAMPLES_HASHED, length))
    fingerprint[f"hash of {min(_SAMPLES_HASHED, length)} samples"] = fingerprint.pop("samples", "")
    return {"values": {"length": f"{length:,}", **{name: str(value) for name, value in fingerprint.items()}}}


def judge_dataset(reports: Reports) -> list[Finding]:
    values = {rank: each["values"] for rank, each in reports.facts(DATASET).items()}
    found = differences(values)
    if found:
        advice = "copy the data to all nodes again, or let one rank read for all: dataloader.train.readers=rank0"
        return [Finding(RED, "; ".join(found), advice)]
    return [
        Finding(OK, f"{', '.join(f'{name} {value}' for name, value in each.items())}; {len(values)} rank(s) read")
        for each in list(values.values())[:1]
    ]


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
    words = "data {} x tensor {} x pipeline {}".format(*sizes)
    return warnings or [Finding(OK, f"{words} on {num_nodes} node(s) of {ranks_per_node} ({_listed(list(hosts))})")]


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
