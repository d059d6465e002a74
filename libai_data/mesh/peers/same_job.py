"""Whether ranks that connect belong to one job, and run on the machines that OneFlow expects."""

from __future__ import annotations

import json
import os
from typing import Any

from libai_data.errors import MeshError


def told_by_rank0(facts: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's facts, over OneFlow's own connections. Collective."""
    import oneflow as flow

    sent = json.dumps(facts).encode() if flow.env.get_rank() == 0 else None
    received: dict[str, Any] = json.loads(flow._oneflow_internal.cpu_broadcast(sent, 0))
    return received


def check_same_job(own: dict[str, Any], theirs: dict[str, Any], rank: int, world_size: int, nodes: int) -> None:
    """Refuse ranks of two jobs, and nodes that are not the machines, by the `job` and the `machine` of this rank."""
    where = f"{os.environ.get('MASTER_ADDR')}, port {os.environ.get('MASTER_PORT')}"
    if own["job"] != theirs["job"]:
        raise MeshError(
            f"rank {rank} of job {own['job']} met rank 0 of job {theirs['job']} at {where}; two jobs use one "
            "port: give each its own --master_port"
        )
    per_node = world_size // nodes
    node, expected = divmod(rank, per_node)
    if (own["machine"] == theirs["machine"]) != (node == 0):
        here = "the machine of rank 0" if node else "another machine than rank 0"
        raise MeshError(
            f"rank {rank} of node {node} runs on {here}: OneFlow computes wrong sums when two nodes "
            "run on one machine, or one node on two. Start one launcher on each machine, and use no loopback "
            f"address as --master_addr (met at {where})"
        )
    local_rank = os.environ.get("LOCAL_RANK", "")
    if local_rank.isdigit() and int(local_rank) != expected:
        raise MeshError(
            f"rank {rank} was started as local rank {local_rank}, but OneFlow found {nodes} node(s) of "
            f"{per_node} rank(s) at {where}. Two nodes need two machines, each with an "
            "address of its own: OneFlow computes wrong sums when both run on one"
        )
