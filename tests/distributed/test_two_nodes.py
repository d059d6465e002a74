"""Two real nodes of two ranks: the same batches in every mode, each node's data read there, and failures end both."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable

import pytest

from libai_data.launch.launcher import free_port
from tests.deadline import stretched
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
)
from tests.distributed.jobs import Ended, Job, check_end, launch_command, says_who_is_gone
from tests.distributed.launcher import launch_ranks, once_for_each
from tests.distributed.namespaces import Node, two_nodes, why_not
from tests.distributed.processes import BOOTSTRAP, ranks_environment
from tests.properties import slowly

FAULTS = Path(__file__).parent / "scripts" / "faults_job.py"
OWN_LOOP = FAULTS.with_name("own_loop.py")
SHORT = ("4x1x1",)
LONG = ("2x2x1", "2x2x1, all", "1x4x1", "2x1x2", "1x2x2", "1x1x4")
"""Meshes of the launch in the short run, and of the one that the long run adds."""

each_mesh = pytest.mark.parametrize("mesh", [*SHORT, *map(slowly, LONG)])
FoundOn = Callable[[str], Found]
BYTES_OF_HEADS = 4096

reason = why_not()
pytestmark = pytest.mark.skipif(reason is not None, reason=reason or "")


def run_on(nodes: Sequence[Node], timeout: float, script: Path, *args: str, ranks: int = 2) -> Ended:
    """Run a script on some ranks of each node, through a launcher on each."""
    with Job() as job:
        start_on(job, nodes, script, *args, ranks=ranks)
        return job.wait(timeout)


def start_on(
    job: Job,
    nodes: Sequence[Node],
    script: Path,
    *args: str,
    ranks: int = 2,
    env_of: Callable[[int], Mapping[str, str]] = lambda node: {},
) -> None:
    """Start a script on some ranks of each node, through a launcher on each."""
    port = str(free_port())
    for number, node in enumerate(nodes):
        where = ["--nnodes", "2", "--node_rank", str(number), "--master_addr", nodes[0].address]
        command = launch_command(ranks, *where, "--master_port", port) + [str(BOOTSTRAP), str(script), *args]
        job.start(node.command(*command), ranks_environment(env_of(number)))


@pytest.fixture(scope="module")
def found_on(tmp_path_factory: pytest.TempPathFactory) -> FoundOn:
    """What the four ranks on two nodes saw."""

    def found(meshes: tuple[str, ...]) -> Found:
        folder = tmp_path_factory.mktemp("two_nodes")
        with two_nodes() as nodes:
            ended = run_on(nodes, 280, SCRIPT, str(folder), *meshes)
        assert ended.codes == [0, 0], ended.output
        assert not ended.left, ended.output
        return read_found(folder, 4, nodes=2)

    return once_for_each((SHORT, LONG), found)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What one rank saw."""
    folder = tmp_path_factory.mktemp("alone")
    launch = launch_ranks(SCRIPT, 1, str(folder), "1x1x1", timeout=120)
    assert launch.returncode == 0, launch.output
    return read_found(folder, 1, nodes=1)


@each_mesh
def test_two_nodes_give_the_batches_of_one_rank(mesh: str, found_on: FoundOn, alone: Found) -> None:
    check_same_batches(found_on(mesh), alone, mesh, unpadded=["every_rank", "node"])


@each_mesh
def test_each_sample_is_read_once_on_each_node_that_needs_it(mesh: str, found_on: FoundOn) -> None:
    found = found_on(mesh)
    data, tensor, _ = sizes_of(mesh)
    nothing = {"opened": 0, "read": []}

    def without_bytes(each: Any) -> Any:
        return {name: value for name, value in each.items() if name != "received"}

    for scenario in scenarios(found, mesh):
        if scenario.partition(",")[0] != "counted":
            continue
        saw: list[Any] = [without_bytes(each[mesh][scenario]["rank0"]["saw"]) for each in found]
        assert saw == [{"opened": 1, "read": list(range(24))}, nothing, nothing, nothing]
        saw = [without_bytes(each[mesh][scenario]["node"]["saw"]) for each in found]
        assert saw[1] == saw[3] == nothing
        for node, leader in enumerate((0, 2)):
            shards = {rank // tensor % data for rank in (2 * node, 2 * node + 1)}
            rows = 8 // data
            needed = [index for index in range(24) if index % 8 // rows in shards]
            assert saw[leader] == {"opened": 1, "read": needed}


@each_mesh
@pytest.mark.parametrize("mode", MODES)
def test_the_plan_is_what_the_nodes_read_and_receive(mode: str, mesh: str, found_on: FoundOn) -> None:
    """Bytes are counted by the system, with the heads of the messages."""
    found = found_on(mesh)
    counted = [name for name in scenarios(found, mesh) if name.partition(",")[0] == "counted"]
    assert counted
    for scenario in counted:
        saw: list[Any] = [each[mesh][scenario][mode]["saw"] for each in found]
        for node, traffic in enumerate(planned(mode, mesh, 2)):
            own = saw[2 * node : 2 * node + 2]
            assert sum(len(each["read"]) for each in own) == COUNTED_BATCHES * traffic.samples_read
            received, expected = sum(each["received"] for each in own), COUNTED_BATCHES * traffic.bytes_received
            heads = BYTES_OF_HEADS if mode == "rank0" and node == 1 else 0
            assert expected <= received <= expected + heads, (scenario, node)


@each_mesh
def test_memory_is_planned_for_what_is_used(mesh: str, found_on: FoundOn) -> None:
    check_warnings(found_on(mesh), mesh)


@pytest.mark.slow
def test_neither_batches_nor_loaders_leave_anything_behind(tmp_path: Path) -> None:
    with two_nodes() as nodes:
        ended = run_on(nodes, 200, SOAK_SCRIPT, str(tmp_path), "rank0")
    assert ended.codes == [0, 0], ended.output
    assert not ended.left
    check_nothing_grows(tmp_path, ranks=4)


@pytest.mark.parametrize(
    ("case", "readers", "ranks"),
    [
        slowly("kill:3", "rank0", 2),
        slowly("kill:2", "node+fork", 2),  # the reader of the second node
        ("kill:0", "rank0+fork", 1),
        slowly("raise:3", "node", 2),
        slowly("dataset", "rank0", 2),
    ],
)
def test_a_failure_on_one_node_ends_both(case: str, readers: str, ranks: int, tmp_path: Path) -> None:
    with two_nodes() as nodes:
        ended = run_on(nodes, 90, FAULTS, case, readers, "2", str(tmp_path), ranks=ranks)
    assert (tmp_path / "fault").exists(), ended.output
    check_end(ended, tmp_path)
    if case.startswith("raise"):
        assert len(re.findall(r"^RuntimeError: the model of rank 3 is broken", ended.output, re.MULTILINE)) == 1
    if case == "dataset":
        assert len(re.findall(r"^OSError: sample 45 cannot be read", ended.output, re.MULTILINE)) == 1
    if case.startswith("kill"):
        assert says_who_is_gone(ended.output), ended.output


@pytest.mark.slow
@pytest.mark.parametrize("case", ["hang:each", "hang:1"])
def test_a_network_that_vanishes_without_a_word_ends_both_nodes(case: str, tmp_path: Path) -> None:
    """Nothing is closed: packets are lost, and no side hears of the other any more."""
    with two_nodes() as nodes, Job() as job:
        start_on(job, nodes, FAULTS, case, "rank0", "0", str(tmp_path), ranks=1)
        job.wait_for((tmp_path / "fault").exists, "fault")
        nodes[0].run("ip", "link", "set", "veth0", "down")
        vanished = time.time()
        ended = job.wait(60)
    print(f"the job ended {ended.at - vanished:.2f} s after the network had vanished")
    assert all(ended.codes), ended.output
    assert not ended.left, ended.output
    assert ended.at - vanished < stretched(30), ended.output
    for output, other in zip(ended.outputs, ("rank 1 of node 1", "rank 0")):
        assert f"{other}, or the network to it, is gone" in output, ended.output


@pytest.mark.slow
def test_a_rank_that_leaves_early_ends_both_nodes_and_is_named(tmp_path: Path) -> None:
    with two_nodes() as nodes:
        ended = run_on(nodes, 90, OWN_LOOP, "break in a step:3", "node", str(tmp_path))
    assert all(ended.codes), ended.output
    for rank in (0, 1, 2):
        assert f"rank {rank} ends: rank 3 has left the job after" in ended.output, ended.output
