"""Packs in lanes without lengths: each rank reads its own lanes, and the log and the checks are those of all lanes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launcher import found_by_ranks
from tests.distributed.scripts.own_lanes import MESHES, READERS, STEPS, loader_of, logged, packs

SCRIPT = Path(__file__).parent / "scripts" / "own_lanes.py"
DOCUMENTS = 120

# Fault -> step at which it is named (checks come at every second one), and how.
EXPECTED = {
    "a foreign state": (0, r"step 3: .* starts in the restored state \w+ on rank 0 2-3, but .* on rank 1$"),
    "a foreign state on a rank that does not read": (0, r"starts in the restored state \w+ on rank 0 2-3, but "),
    "a foreign state, with lengths": (0, r"starts in the restored state \w+ on rank 0 2-3, but "),
    "a foreign state in an epoch": (0, r"starts in the restored state \w+ on rank 0 2-3, but "),
    "an older state": (0, r"the position differs: 24 on rank 0 2-3, but 16 on rank 1"),
    "other lengths": (4, r"the start of a lane differs: \[85, 3\] on rank 0-2, but \[89, 0\] on rank 3"),
    "another sample in an epoch": (4, r"the start of a lane differs: \[85, 3\] on rank 0-2, but \[89, 0\] on rank 3"),
    "another sample on a tensor peer": (
        4,
        r"the start of a lane differs: \[85, 3\] on rank 2, but \[89, 0\] on rank 3",
    ),
    "another sample on a tensor peer, found when saving": (
        7,
        r"states of their loaders, but the start of a lane differs: \[129, 0\] on rank 2, but \[133, 0\] on rank 3",
    ),
    "a state that is saved a batch later": (0, r"at different positions: 8 on rank 0 2-3, but 16 on rank 1; call "),
}


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


@pytest.mark.parametrize("fault", EXPECTED)
def test_a_rank_with_other_starts_is_named_on_all_ranks(found: list[dict[str, Any]], fault: str) -> None:
    step, message = found[0]["faults"][fault]
    expected_step, pattern = EXPECTED[fault]
    assert step == expected_step and message.startswith("ContractError"), message
    assert re.search(pattern, message), message
    assert [of_rank["faults"][fault] for of_rank in found] == [[step, message]] * 4


def test_no_planted_fault_is_untested(found: list[dict[str, Any]]) -> None:
    assert set(found[0]["faults"]) == set(EXPECTED)
