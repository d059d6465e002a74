"""Whether the mesh fits the nodes, and the nodes each other."""

from __future__ import annotations

import socket

from libai_data.doctor.examined import Examined
from libai_data.doctor.findings import OK, RED, WARNING, Facts, Finding, Reports
from libai_data.engine.agreement import mesh_warnings
from libai_data.parallel_mesh import ParallelMesh

NAME = "mesh"
PLACE = "place"

_HOSTS_NAMED = 8


def examine_place(examined: Examined) -> Facts:
    """Where this rank is."""
    return {"local_rank": examined.job.local_rank, "host": socket.gethostname()}


def examine(examined: Examined) -> Facts:
    """Sizes of the axes."""
    mesh = examined.mesh
    return {"sizes": [mesh.data_parallel_size, mesh.tensor_parallel_size, mesh.pipeline_parallel_size]}


def judge(reports: Reports) -> list[Finding]:
    """Look at the whole job, of which each rank knows its own place only."""
    places, facts = reports.facts(PLACE), reports.facts(NAME)
    if not facts or len(places) < reports.world_size:
        return []
    sizes, num_nodes = next(iter(facts.values()))["sizes"], reports.num_nodes
    hosts: dict[str, int] = {}
    for each in places.values():
        hosts[each["host"]] = hosts.get(each["host"], 0) + 1
    ranks_per_node = reports.world_size // num_nodes
    if reports.world_size % num_nodes or any(
        each["local_rank"] != rank % ranks_per_node for rank, each in places.items()
    ):
        counts = _listed([f"{host}: {count}" for host, count in hosts.items()])
        return [Finding(RED, f"the nodes have different numbers of ranks ({counts})", "start as many on each node")]
    mesh = ParallelMesh(sizes[0], sizes[1], sizes[2], num_nodes=num_nodes)
    warnings = [Finding(WARNING, *_two_sentences(warning)) for warning in mesh_warnings(mesh)]
    words = "data {} x tensor {} x pipeline {}".format(*sizes)
    return warnings or [Finding(OK, f"{words} on {num_nodes} node(s) of {ranks_per_node} ({_listed(list(hosts))})")]


def _listed(hosts: list[str]) -> str:
    return ", ".join(hosts[:_HOSTS_NAMED]) + (", ..." if len(hosts) > _HOSTS_NAMED else "")


def _two_sentences(warning: str) -> list[str]:
    found, _, advice = warning.partition(". ")
    return [found, advice]
