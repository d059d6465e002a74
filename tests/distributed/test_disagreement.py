"""Ranks whose batches differ are all told of it alike: nothing hangs, and no rank takes another's bytes for its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.launcher import found_by_ranks

SCRIPT = Path(__file__).parent / "scripts" / "disagree_on_fields.py"

TOLD = {
    "agree": "agreed",
    "missing on rank 0": "field 'y' is missing on rank 0",
    "missing on rank 1": "field 'y' is missing on rank 1",
    "other name on rank 1": "field 'y' is missing on rank 1; field 'z' is missing on rank 0",
    "no fields on rank 1": "field 'x' is missing on rank 1; field 'y' is missing on rank 1",
    "other order on rank 1": r"another order: rank 0 has \['x', 'y'\], rank 1 has \['y', 'x'\]",
    "other dtype on rank 1": r"field 'y' is int64 \[2, 4\], .* on rank 0, but int32 \[2, 4\], .* on rank 1",
    "other shape on rank 0": r"field 'y' is int64 \[2, 3\], .* on rank 0, but int64 \[2, 4\], .* on rank 1",
    "more rows on rank 1": r"field 'y' is int64 \[2, 4\], .* on rank 0, but int64 \[4, 4\], .* on rank 1",
    "other signature on rank 1": r"field 'x' is .*'broadcast'\] on layer 0 on rank 0, but .*'split_1'\] .* on rank 1",
    "other layer on rank 1": r"field 'x' is .* on layer 0 on rank 0, but .* on layer -1 on rank 1",
    "strings on rank 1 alone": "field 'z' is missing on rank 0",
    "strings and numbers": r"field 'y' is int64 \[2, 4\], .* on rank 0, but strings on rank 1",
    "first batch of a loader": r"field 'y' is int64 .* on rank 0, but bool .* on rank 1",
    "third batch of a collator": r"field 'tokens' is float64 \[2, 3\], .* rank 0, but float64 \[2, 5\], .* rank 1 "
    r"\(a collator that pads .*fixed=True, .*readers=rank0",
    "an entry for each sample": r"field 'boxes' has an entry for each of the 2 samples of this rank, "
    r"as 'boxes.0.box' of shape \[3, 4\].*PadCollator",
    "an entry for each view": "agreed",
    "agree again": "agreed",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Case -> what each of two ranks was told; one launch for all cases."""
    return found_by_ranks(SCRIPT, 2, tmp_path_factory.mktemp("told"), timeout=100)


@pytest.mark.parametrize("case", list(TOLD))
def test_every_rank_is_told_the_same_of_field_and_ranks(case: str, told: list[dict[str, str]]) -> None:
    assert told[0][case] == told[1][case]
    assert re.search(TOLD[case], told[0][case])


def test_all_cases_ran(told: list[dict[str, str]]) -> None:
    assert list(told[0]) == list(TOLD)
