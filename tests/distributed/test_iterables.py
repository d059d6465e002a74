"""Iterables on four ranks: each global batch is that of one rank, and ends and failures come for all ranks at once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Callable

import pytest

from tests.distributed.launcher import found_by_ranks, once_for_each
from tests.distributed.namespaces import two_nodes, why_not
from tests.distributed.test_two_nodes import run_on
from tests.properties import slowly

SCRIPT = Path(__file__).parent / "scripts" / "iterables_on_ranks.py"
MODES = ("every_rank", "node", "rank0")
SHORT, LONG = "2x2x1", "4x1x1"
"""The mesh of the launch in the short run, and of the one that the long run adds."""
Found = list[dict[str, Any]]
FoundOn = Callable[[str], Found]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What one rank saw."""
    return found_by_ranks(SCRIPT, 1, tmp_path_factory.mktemp("alone"), "1x1x1", timeout=150)


@pytest.fixture(scope="module")
def four_on(tmp_path_factory: pytest.TempPathFactory) -> FoundOn:
    """What each of four ranks saw on a mesh."""

    def found(meshes: tuple[str, ...]) -> Found:
        return found_by_ranks(SCRIPT, 4, tmp_path_factory.mktemp("four"), *meshes, timeout=150)

    return once_for_each([(SHORT,), (LONG,)], found)


@pytest.fixture(scope="module")
def four(four_on: FoundOn) -> Found:
    """What each of four ranks saw in the launch of the short run."""
    return four_on(SHORT)


def whole(found: Found, mesh: str, scenario: str, readers: str) -> list[Any]:
    """The global batches, after checking that ranks of one shard saw the same, and all equally many."""
    shards: dict[int, list[Any]] = {}
    for each in found:
        shard, batches = each["meshes"][mesh][scenario][readers]
        assert shards.setdefault(shard, batches) == batches
    assert len({len(batches) for batches in shards.values()}) == 1
    joined = []
    for parts in zip(*(shards[shard] for shard in sorted(shards))):
        assert len({tuple(part[:3]) for part in parts}) == 1
        joined.append([*parts[0][:3], [row for part in parts for row in part[3]]])
    return joined


@pytest.mark.parametrize("mesh", [SHORT, slowly(LONG)])
@pytest.mark.parametrize(
    "scenario",
    [
        *("samples, cycle", "samples, drop", "samples, pad", "batches", "map-style", "texts"),
        *("resumed", "interleaved", "packed", "failing rows", "resumed shards"),
    ],
)
def test_global_batches_are_those_of_one_rank_in_every_read_mode(
    scenario: str, mesh: str, alone: Found, four_on: FoundOn
) -> None:
    expected = whole(alone, "1x1x1", scenario, "every_rank")
    assert expected
    for readers in MODES:
        assert whole(alone, "1x1x1", scenario, readers) == expected, readers
        assert whole(four_on(mesh), mesh, scenario, readers) == expected, readers


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_two_nodes_have_the_batches_of_one_and_fail_together(tmp_path: Path, four_on: FoundOn) -> None:
    with two_nodes() as nodes:
        ended = run_on(nodes, 200, SCRIPT, str(tmp_path), LONG)
    assert ended.codes == [0, 0], ended.output
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for scenario in found[0]["meshes"][LONG]:
        for readers in MODES:
            expected = whole(four_on(LONG), LONG, scenario, readers)
            assert whole(found, LONG, scenario, readers) == expected, (scenario, readers)
    for fault in TOLD:
        for readers in MODES:
            outcomes = [each["faults"][fault][readers] for each in found]
            assert all("Error: " in outcome for outcome in outcomes), (fault, readers, outcomes)


def test_the_scenarios_are_what_they_claim(alone: Found) -> None:
    cycle = whole(alone, "1x1x1", "samples, cycle", "rank0")
    assert [batch[0] for batch in cycle] == [0, 0, 0, 1, 1, 1, 2]
    assert [batch[2] for batch in whole(alone, "1x1x1", "samples, pad", "rank0")] == [8, 8, 6]
    assert len(whole(alone, "1x1x1", "samples, drop", "rank0")) == 2
    assert whole(alone, "1x1x1", "resumed", "node") == cycle[3:]


@pytest.mark.parametrize(("mesh", "shards"), [(SHORT, 2), slowly(LONG, 4)])
def test_each_shard_of_a_factory_goes_to_its_ranks_and_unequal_ends_come_together(
    mesh: str, shards: int, four_on: FoundOn
) -> None:
    rows = 8 // shards
    own = [list(range(shard, 30, shards)) for shard in range(shards)]
    steps = min(len(each) for each in own) // rows
    for readers in MODES:
        found = whole(four_on(mesh), mesh, "shards, drop", readers)
        assert [batch[3] for batch in found] == [
            [row for each in own for row in each[step * rows : (step + 1) * rows]] for step in range(steps)
        ]
        cycled = [batch[3] for batch in whole(four_on(mesh), mesh, "shards, cycle", readers)]
        assert cycled == [
            [each[place % len(each)] for each in own for place in range(step * rows, (step + 1) * rows)]
            for step in range(9)
        ]


TOLD = {
    "raises on all": (r"SampleError: raises.<locals>.breaks raised OSError after 20 item.*disk is gone", r".*"),
    "raises on rank 0": (r"SampleError: .*breaks raised OSError.*disk is gone", r"PeerError: rank(\(s\) \[0\]| 0)"),
    "hangs on rank 0": (
        r"SampleError: hangs has yielded nothing for [\d.]+ s, after 20 item",
        r"PeerError: rank(\(s\) \[0\]| 0)",
    ),
    "cannot be opened on rank 0": (r"SampleError: opens raised FileNotFoundError.*no such bucket", r".*Error: .*"),
}


@pytest.mark.parametrize("readers", MODES)
@pytest.mark.parametrize("fault", TOLD)
def test_a_failing_iterable_is_named_and_no_rank_is_left_waiting(fault: str, readers: str, four: Found) -> None:
    first, *others = [each["faults"][fault][readers] for each in four]
    on_the_rank, elsewhere = TOLD[fault]
    assert re.match(on_the_rank, first), first
    for outcome in others:
        assert re.match(elsewhere, outcome), outcome
        assert "batches" not in outcome[:12]


def test_a_rank_that_raises_alone_or_ends_early_or_reads_other_rows_is_named_on_all(four: Found) -> None:
    faults = [each["faults"] for each in four]
    for rank, each in enumerate(faults):
        raised = each["raises on rank 1"]["every_rank"]
        pattern = "SampleError: .*breaks" if rank == 1 else r"PeerError: rank\(s\) \[1\] could not read .*breaks"
        assert re.match(pattern, raised), raised
        early = each["ends early on rank 1"]["every_rank"]
        assert re.match(r"ContractError: ends_early has ended on rank\(s\) \[1\], but continues on the other", early)
        other = each["differs on rank 1"]["every_rank"]
        assert re.match(r"ContractError: differs yields other samples on rank\(s\) \[1\] than on rank 0", other)
        for readers in ("node", "rank0"):  # Rank 1 reads nothing.
            assert each["raises on rank 1"][readers] == each["differs on rank 1"][readers] == "7 batches"


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        ("skips a row on rank 1", "last 8 rows before row 232 of epoch 0"),
        ("skips a row at the end on rank 1", "last 8 rows before row 2 of epoch 1"),
        ("changes a value on rank 1", "last 8 rows before row 96 of epoch 0"),
    ],
)
def test_a_rank_that_leaves_a_row_out_or_changes_one_is_named_before_the_batch_is_taken(
    fault: str, place: str, four: Found
) -> None:
    for each in four:
        told = each["faults"][fault]["every_rank"]
        assert re.match(rf"ContractError: .* yields other samples on rank\(s\) \[1\] than on rank 0, .*{place}", told)
    assert all("batches" in each["faults"][fault]["rank0"] for each in four)


def test_ranks_of_one_shard_must_go_through_the_same_rows(four: Found) -> None:
    for each in four:
        assert re.match(r"ContractError: .* on rank\(s\) \[1\] than on rank 0, .*row 92 of epoch 0", each["peers"])


def test_a_module_prepares_once_and_all_ranks_hear_of_its_failure(tmp_path: Path) -> None:
    script = SCRIPT.with_name("datamodule_on_ranks.py")
    for rank, found in enumerate(found_by_ranks(script, 4, tmp_path, timeout=60)):
        # A batch of another tool is a global batch, of which each rank gets its row.
        assert found["once"] == found["once a node"] == [[[start + rank], 4] for start in (0, 4, 8)]
        for fault, told in (("fails", "OSError: no space"), ("exits", r"ConfigError: .*called sys.exit\(0\)")):
            expected = told if rank == 0 else r"PeerError: prepare_data of Module failed on rank\(s\) \[0\]"
            assert re.match(expected, found[fault]), found[fault]
