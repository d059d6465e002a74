"""What batches cost the nodes, by definition of the read modes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from libai_data.delivery.read_plan import READERS, FieldSize, ReadPlan, node_traffic, times_read
from libai_data.mesh.parallel_mesh import ParallelMesh
from tests.properties import examples

FIELDS = (FieldSize("images", 100), FieldSize("labels", 8, placement_idx=-1))
EACH = 108


def meshes() -> st.SearchStrategy[ParallelMesh]:
    def on_nodes(sizes: list[int]) -> st.SearchStrategy[ParallelMesh]:
        ranks = sizes[0] * sizes[1] * sizes[2]
        counts = [count for count in range(1, ranks + 1) if ranks % count == 0]
        return st.sampled_from(counts).map(lambda nodes: ParallelMesh(sizes[0], sizes[1], sizes[2], num_nodes=nodes))

    return st.lists(st.integers(1, 6), min_size=3, max_size=3).flatmap(on_nodes)


@settings(max_examples=examples(60), deadline=None)
@given(meshes(), st.sampled_from(READERS), st.integers(1, 5))
def test_samples_are_read_and_sent_as_often_as_the_read_mode_says(mesh: ParallelMesh, readers: str, rows: int) -> None:
    plan = ReadPlan(mesh, readers)
    costs = [node_traffic(plan, node, FIELDS, rows) for node in range(mesh.num_nodes)]
    batch = rows * mesh.data_parallel_size
    assert sum(cost.samples_read for cost in costs) == times_read(plan) * batch
    assert sum(cost.bytes_read for cost in costs) == times_read(plan) * batch * EACH
    assert all(cost.bytes_received == 0 for cost in costs) == (readers != "rank0" or mesh.num_nodes == 1)
    assert sum(cost.bytes_sent for cost in costs) == sum(cost.bytes_received for cost in costs)
    if readers == "rank0":
        assert times_read(plan) == 1 and costs[0].bytes_kept == batch * EACH


def test_a_field_of_the_last_stage_is_received_by_the_nodes_of_that_stage_alone() -> None:
    plan = ReadPlan(ParallelMesh(2, 1, 2, num_nodes=2), "rank0")
    assert node_traffic(plan, 1, FIELDS, 3).bytes_received == 2 * 3 * 8


def test_parts_of_samples_are_read_by_those_who_read_for_themselves() -> None:
    mesh = ParallelMesh(1, 4, 1)
    fields = (FieldSize("tokens", 4096, read_parts=4),)
    assert node_traffic(ReadPlan(mesh, "every_rank"), 0, fields, 2).bytes_read == 2 * 4096
    assert node_traffic(ReadPlan(mesh, "node"), 0, fields, 2).bytes_read == 2 * 4096
