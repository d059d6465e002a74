"""Reads what scripts/delivery_scenarios.py wrote down, and puts the rows of the ranks together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List

SCRIPT = Path(__file__).parent / "scripts" / "delivery_scenarios.py"
MODES = ("data_parallel", "node", "rank0")

Found = List[Dict[str, Any]]
"""Of each rank: mesh -> scenario -> read mode -> what it saw."""


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
        shards: Dict[int, Any] = {}
        for part in parts:
            assert part["place"] == parts[0]["place"]
            assert part.get("state") == parts[0].get("state")
            assert shards.setdefault(part["shard"], part["rows"]) == part["rows"]
        rows = {name: [row for shard in sorted(shards) for row in shards[shard][name]] for name in parts[0]["rows"]}
        batches.append({"place": parts[0]["place"], "rows": rows, "state": parts[0].get("state")})
    assert all(len(each) == len(saw[0]) for each in saw)
    return batches


def scenarios(found: Found, mesh: str) -> List[str]:
    """Names of the scenarios that were lived through on a mesh."""
    return list(found[0][mesh])
