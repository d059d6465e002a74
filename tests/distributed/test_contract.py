"""Ranks that are fed otherwise than their layout promises are named within the interval."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launcher import found_by_ranks

SCRIPT = Path(__file__).parent / "scripts" / "contract_faults.py"

# Fault -> step at which it is named (checks come at steps 0, 4, ...; changed batches begin at 2), and how.
EXPECTED = {
    "another seed on a data-parallel rank": (
        0,
        r"ContractError.*order of the samples.*seed 5.* on rank 0-1, but .*"
        r"seed 7.* on rank 2-3",
    ),
    "another seed on a tensor peer": (0, r"ContractError.*order of the samples.*seed 5.*rank 0-2.*seed 6.*rank 3"),
    "no shuffling on one rank": (0, r"ContractError.*order of the samples.*True on rank 0-1 3.*False on rank 2"),
    "a sample less on one node's disk": (0, r"ContractError.*order of the samples.*samples 50.*samples 49.*rank 2-3"),
    "a skipped batch": (
        4,
        r"ContractError.*different batches in one step: step 3 of the loader \(epoch 0, position 24, 8 rows\) on rank "
        r"0-2, but step 4 .* on rank 3",
    ),
    "a repeated batch": (
        4,
        r"ContractError.*different batches in one step: step 3 of .* on rank 0 2-3, but step 2 of .* on rank 1",
    ),
    "swapped fields": (4, r"ContractError.*step 4: field 'tokens': rank 3.*than rank 2.*field 'labels': rank 3"),
    "stale memory": (4, r"ContractError.*step 4: field 'tokens': rank 1 has other bytes than rank 0"),
    "a lost row": (4, r"ContractError.*step 4: field 'tokens': rank 3 has other bytes than rank 2"),
    "rows in another order": (4, r"ContractError.*step 4: field 'labels': rank 3 has other bytes than rank 2"),
    "a batch changed in place": (4, r"ContractError.*step 4: field 'tokens': rank 1 has other bytes than rank 0"),
    "another dtype, later": (4, r"SchemaError.*field 'tokens' is int64.*on rank 0-1, but int32.*on rank 2-3"),
    "a transform that draws from the rank's state": (0, r"ContractError.*step 0: field 'tokens': rank 1.*than rank 0"),
    "one altered sample on a tensor peer": (4, r"ContractError.*step 4: field 'tokens': rank 1.*other bytes.*rank 0"),
    "a sample that only a tensor peer cannot read": (
        4,
        r"ContractError.*step 4: .*other samples failed and were replaced on rank 1 than on rank 0",
    ),
    "a neighbour's sample": (0, r"ContractError.*step 0: sample \d+ of epoch 0 has other values on rank 3 than"),
    "other data on a data-parallel rank": (0, r"ContractError.*sample \d+ of epoch 0 has other values on rank 2 than"),
    "two loaders in another order": (0, r"ContractError.*other values on rank 2 than on rank 0.*in another order"),
    "another epoch": (0, r"ContractError.*the epoch differs: 0 on rank 0-1, but 1 on rank 2-3"),
    "overlapping shards": (
        0,
        r"ContractError.*step 0: sample \d+ of epoch 0 was read by rank 0 and by rank 2 .*give it a DistributedSampler",
    ),
    "another shard than the tensor peer": (0, r"ContractError.*rank 3 has read other samples than rank 2"),
    "another global batch size": (0, r"ContractError.*step 0: the global batch size differs: 8 on .*6 on rank 2-3"),
    "a list that is shorter": (
        2,
        r"ContractError.*step 2: the global batch size differs: 8 on rank 0-1, but 6 on rank 2-3.*equally long",
    ),
    "a list less": (0, r"ContractError.*lists per epoch 7 on rank 0-1, but .*lists per epoch 6 on rank 2-3"),
}

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each rank found; one launch."""
    return found_by_ranks(SCRIPT, 4, tmp_path_factory.mktemp("contract"), timeout=150)


@pytest.mark.parametrize("fault", EXPECTED)
def test_a_planted_fault_is_named_within_the_interval_on_every_rank(fault: str, results: Results) -> None:
    step, message = results[0][fault]
    expected_step, pattern = EXPECTED[fault]
    assert step == expected_step, message
    assert re.search(pattern, message), message
    assert [found[fault] for found in results] == [results[0][fault]] * 4


def test_no_planted_fault_is_untested(results: Results) -> None:
    assert set(results[0]) == set(EXPECTED)
