"""Every read mode gives the same batches, on every mesh, through all that a training does; each sample is read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest

from tests.distributed.delivered import (
    COUNTED_BATCHES,
    MODES,
    SCRIPT,
    SOAK_SCRIPT,
    Found,
    check_nothing_grows,
    check_same_batches,
    check_warnings,
    planned,
    read_found,
    scenarios,
    sizes_of,
    whole,
)
from tests.distributed.launcher import launch_ranks, once_for_each, ranks_of
from tests.properties import slowly

SHORT = (("1x1x1",), ("2x2x1", "1x2x2"))
LONG = (("1x1x1, all",), ("2x1x1, all", "1x2x1", "1x1x2"), ("2x2x1, all", "4x1x1", "1x4x1", "2x1x2", "1x1x4"))
"""Meshes of each launch in the short run, and of those that the long run adds."""

each_mesh = pytest.mark.parametrize("mesh", [*sum(SHORT, ()), *map(slowly, sum(LONG, ()))])
FoundOn = Callable[[str], Found]


@pytest.fixture(scope="module")
def found_on(tmp_path_factory: pytest.TempPathFactory) -> FoundOn:
    """What the ranks of a mesh saw."""

    def found(meshes: tuple[str, ...]) -> Found:
        folder, world_size = tmp_path_factory.mktemp("delivery"), ranks_of(meshes[0])
        launch = launch_ranks(SCRIPT, world_size, str(folder), *meshes, timeout=280)
        assert launch.returncode == 0, launch.output
        return read_found(folder, world_size, nodes=1)

    return once_for_each(SHORT + LONG, found)


@each_mesh
def test_every_mode_and_kind_of_worker_gives_the_batches_of_one_rank(mesh: str, found_on: FoundOn) -> None:
    check_same_batches(found_on(mesh), found_on("1x1x1"), mesh, unpadded=["every_rank"])


def test_the_scenarios_are_what_they_claim(found_on: FoundOn) -> None:
    alone = found_on("1x1x1")
    stream = whole(alone, "1x1x1", "stream", "every_rank")
    assert [batch["place"][1] for batch in stream][-1] == 3  # 37 samples an epoch
    rounds = whole(alone, "1x1x1", "rounds", "every_rank")
    assert [batch["place"][4] for batch in rounds] == [8, 8, 5] * 2
    assert [batch["rows"] for batch in rounds[:3]] == [batch["rows"] for batch in rounds[3:]]
    ragged = whole(alone, "1x1x1", "ragged", "every_rank")
    assert len({batch["rows"]["tokens"][0].split("]")[0] for batch in ragged}) > 3
    assert whole(alone, "1x1x1", "resumed", "rank0") == [{**batch, "state": None} for batch in stream[7:15]]


@each_mesh
def test_each_sample_is_read_once_by_whoever_reads(mesh: str, found_on: FoundOn) -> None:
    found = found_on(mesh)
    _, tensor, pipeline = sizes_of(mesh)
    for scenario in scenarios(found, mesh):
        if scenario.partition(",")[0] != "counted":
            continue
        saw: dict[str, list[Any]] = {mode: [each[mesh][scenario][mode]["saw"] for each in found] for mode in MODES}
        for mode in ("node", "rank0"):
            reader, *others = saw[mode]
            assert reader["read"] == list(range(24)), (scenario, mode)
            assert others == [{"opened": 0, "read": [], "received": 0}] * (len(found) - 1)
        reads = sorted(index for each in saw["every_rank"] for index in each["read"])
        assert reads == sorted(list(range(24)) * tensor * pipeline)
        for mode in MODES:
            (node,) = planned(mode, mesh, 1)
            assert sum(len(each["read"]) for each in saw[mode]) == COUNTED_BATCHES * node.samples_read
            assert (node.bytes_received, node.bytes_sent) == (0, 0)
        # A worker process gets the dataset as it was opened.
        assert [each["opened"] for each in saw["every_rank"]] == [1] * len(found)
        assert saw["node"][0]["opened"] == saw["rank0"][0]["opened"] == 1


@each_mesh
def test_memory_is_planned_for_what_is_used(mesh: str, found_on: FoundOn) -> None:
    check_warnings(found_on(mesh), mesh)


@pytest.mark.slow
def test_neither_batches_nor_loaders_leave_anything_behind(tmp_path: Path) -> None:
    launch = launch_ranks(SOAK_SCRIPT, 2, str(tmp_path), "node", timeout=150)
    assert launch.returncode == 0, launch.output
    check_nothing_grows(tmp_path, ranks=2)
