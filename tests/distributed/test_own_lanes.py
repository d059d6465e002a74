"""Packs in lanes without lengths: each rank reads its own lanes, and the log is that of all lanes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launcher import found_by_ranks
from tests.distributed.scripts.own_lanes import MESHES, READERS, STEPS, loader_of, logged, packs

SCRIPT = Path(__file__).parent / "scripts" / "own_lanes.py"
DOCUMENTS = 120


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found; one launch."""
    return found_by_ranks(SCRIPT, 4, tmp_path_factory.mktemp("lanes"), timeout=150)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one rank logs that knows the lengths."""
    return logged([lambda: loader_of(packs(known=True))])


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("readers", READERS)
def test_the_log_is_that_of_one_rank_on_each_mesh_and_after_a_resume(
    found: list[dict[str, Any]], alone: dict[str, Any], readers: str, mesh: str
) -> None:
    shown = found[0]["logged"][f"{readers} {mesh}"]
    assert [*shown["log"][-1]] == [
        "position",
        "epoch",
        "consumed_tokens",
        "consumed_tokens/web",
        "consumed_tokens/books",
    ]
    assert shown["log"] == alone["log"]
    assert shown["saved"] == alone["saved"]


@pytest.mark.parametrize("mesh", ["4x1", "2x2"])
def test_no_rank_reads_the_lanes_of_others_to_count_their_tokens(found: list[dict[str, Any]], mesh: str) -> None:
    data_parallel_size, _ = MESHES[mesh][0]
    reads = [of_rank["logged"][f"every_rank {mesh}"]["read"] for of_rank in found]
    assert reads == [DOCUMENTS // data_parallel_size] * 4


@pytest.mark.parametrize("readers", READERS)
def test_batches_have_no_epoch_where_no_rank_knows_it(found: list[dict[str, Any]], readers: str) -> None:
    for of_rank in found:
        assert of_rank["logged"][f"{readers} 4x1"]["epochs"] == [None] * STEPS
