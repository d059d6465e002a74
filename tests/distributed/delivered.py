"""Reads what scripts/delivery_scenarios.py wrote down, and puts the rows of the ranks together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from libai_data.delivery.read_plan import FieldSize, NodeTraffic, ReadPlan, node_traffic
from libai_data.mesh.parallel_mesh import ParallelMesh

SOAK_SCRIPT = Path(__file__).parent / "scripts" / "delivery_soak.py"
SCRIPT = Path(__file__).parent / "scripts" / "delivery_scenarios.py"
MODES = ("every_rank", "node", "rank0")

COUNTED_BATCHES, COUNTED_ROWS = 3, 8
COUNTED_FIELDS = (FieldSize("image", 64 * 320 * 4), FieldSize("label", 8, placement_idx=-1))

Found = list[dict[str, Any]]
"""Of each rank: mesh -> scenario -> read mode -> what it saw."""


def check_same_batches(found: Found, alone: Found, mesh: str, unpadded: Sequence[str]) -> None:
    """Each scenario gave in each mode the batches of one rank alone.

    Args:
        unpadded: modes in which no reader may see the whole batch, so that none pads to its longest sample.
    """
    compared = 0
    for scenario in scenarios(found, mesh):
        plain = scenario.partition(",")[0]
        if plain == "counted":
            continue
        expected = whole(alone, "1x1x1", plain, "every_rank")
        assert expected
        for mode in MODES:
            got = whole(found, mesh, scenario, mode)
            if got is None:
                assert plain == "ragged"
                assert mode in unpadded
                continue
            assert got == expected, (scenario, mode)
            compared += 1
    assert compared >= 9


def check_warnings(found: Found, mesh: str) -> None:
    """Only who keeps batches is told that memory grows."""
    for rank, each in enumerate(found):
        for scenario, modes in each[mesh].items():
            for mode, result in modes.items():
                if not scenario.startswith("kept"):
                    assert not result["warned"], (rank, scenario, mode, result["warned"])


def read_found(folder: Path, ranks: int, nodes: int) -> Found:
    """What each rank wrote."""
    written = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert [each["nodes"] for each in written] == [nodes] * ranks
    return [each["found"] for each in written]


def whole(found: Found, mesh: str, scenario: str, mode: str) -> Any:
    """The global batches of a scenario, after checking that ranks of one shard saw the same."""
    saw = [each[mesh][scenario][mode]["saw"] for each in found]
    if saw[0] is None:
        assert saw == [None] * len(saw)
        return None
    batches = []
    for parts in zip(*saw):
        shards: dict[int, Any] = {}
        for part in parts:
            assert part["place"] == parts[0]["place"]
            assert part.get("state") == parts[0].get("state")
            known = shards.setdefault(part["shard"], {})
            for name, rows in part["rows"].items():
                # What a rank's stage does not need may not have been sent to its node.
                assert rows is None or known.get(name) in (None, rows)
                known[name] = known.get(name) if rows is None else rows
        rows = {name: [row for shard in sorted(shards) for row in shards[shard][name]] for name in parts[0]["rows"]}
        batches.append({"place": parts[0]["place"], "rows": rows, "state": parts[0].get("state")})
    assert all(len(each) == len(saw[0]) for each in saw)
    return batches


def sizes_of(mesh: str) -> tuple[int, int, int]:
    """Data, tensor and pipeline size of a mesh, by its name in the script."""
    data, tensor, pipeline = map(int, mesh.partition(",")[0].split("x"))
    return data, tensor, pipeline


def planned(readers: str, mesh: str, num_nodes: int) -> list[NodeTraffic]:
    """What each node reads and receives for a batch of the scenario "counted", by the plan."""
    data, tensor, pipeline = sizes_of(mesh)
    plan = ReadPlan(ParallelMesh(data, tensor, pipeline, num_nodes=num_nodes), readers)
    return [node_traffic(plan, node, COUNTED_FIELDS, COUNTED_ROWS // data) for node in range(num_nodes)]


def scenarios(found: Found, mesh: str) -> list[str]:
    """Names of the scenarios that were lived through on a mesh."""
    return list(found[0][mesh])


def check_nothing_grows(folder: Path, ranks: int) -> None:
    """Check what scripts/delivery_soak.py wrote: neither batches nor loaders leave anything behind in a process."""
    for rank in range(ranks):
        found = json.loads((folder / f"{rank}.json").read_text())
        for points in found.values():
            first, last = points[0], points[-1]
            # OneFlow opens a connection and allocators map as they please; 1500 batches or 20 loaders would show.
            assert last["descriptors"] <= first["descriptors"] + 5, (rank, found)
            assert last["threads"] <= first["threads"], (rank, found)
            assert last["maps"] <= first["maps"] + 10, (rank, found)
            assert last["objects"] <= first["objects"] + 200, (rank, found)
            assert last["resident KiB"] <= first["resident KiB"] + 8192, (rank, found)
