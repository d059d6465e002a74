"""Who reads what, and what it costs: each shard once per node that needs it, and each rank finds its rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.delivery.read_plan import READERS, FieldSize, ReadPlan, node_traffic, times_read
from libai_data.errors import ConfigError, MeshError
from libai_data.mesh.parallel_mesh import ParallelMesh, spread_layers

FIELDS = (FieldSize("images", 100), FieldSize("labels", 8, placement_idx=-1))
EACH = 108


@st.composite
def plans(draw: st.DrawFn) -> ReadPlan:
    data, tensor, pipeline = draw(st.tuples(*[st.integers(1, 4)] * 3))
    world_size = data * tensor * pipeline
    nodes = draw(st.sampled_from([count for count in range(1, world_size + 1) if world_size % count == 0]))
    stages = spread_layers(pipeline + draw(st.integers(0, 3)), pipeline)
    mesh = ParallelMesh(data, tensor, pipeline, num_nodes=nodes, layer_stage_ids=stages)
    return ReadPlan(mesh, draw(st.sampled_from(READERS)))


def ranks_of(plan: ReadPlan) -> range:
    return range(plan.mesh.world_size)


@given(plans())
def test_the_shard_of_a_rank_is_its_coordinate_on_the_data_axis(plan: ReadPlan) -> None:
    for rank in ranks_of(plan):
        sizes = plan.mesh.data_parallel_size, plan.mesh.tensor_parallel_size, plan.mesh.pipeline_parallel_size
        assert plan.mesh.shard_of(rank) == ParallelMesh(*sizes, rank=rank).data_parallel_rank


@given(plans())
def test_every_rank_is_on_one_node_and_led_from_there(plan: ReadPlan) -> None:
    nodes = [list(plan.ranks_of(node)) for node in range(plan.mesh.num_nodes)]
    assert [rank for ranks in nodes for rank in ranks] == list(ranks_of(plan))
    for node, ranks in enumerate(nodes):
        assert {plan.node_of(rank) for rank in ranks} == {node}
        assert {plan.leader_of(rank) for rank in ranks} == {ranks[0]}


@given(plans())
def test_whatever_a_rank_needs_is_read_for_it(plan: ReadPlan) -> None:
    for rank in ranks_of(plan):
        reader = {"every_rank": rank, "node": plan.leader_of(rank), "rank0": 0}[plan.readers]
        assert plan.mesh.shard_of(rank) in plan.shards_read_by(reader)


@given(plans())
def test_node_and_rank0_read_nothing_twice(plan: ReadPlan) -> None:
    if plan.readers == "every_rank":
        return
    groups = (
        [list(ranks_of(plan))]
        if plan.readers == "rank0"
        else [list(plan.ranks_of(node)) for node in range(plan.mesh.num_nodes)]
    )
    for ranks in groups:
        read = sum((plan.shards_read_by(rank) for rank in ranks), ())
        assert list(read) == sorted(set(read))
        assert set(read) == {plan.mesh.shard_of(rank) for rank in ranks} if plan.readers == "node" else True
        assert [rank for rank in ranks if plan.shards_read_by(rank)] == ranks[:1]


@given(plans(), st.integers(1, 5))
def test_a_rank_finds_the_rows_of_its_shard_in_the_memory_of_its_node(plan: ReadPlan, rows: int) -> None:
    for rank in ranks_of(plan):
        held: tuple[int, ...] = plan.shards_in_memory_of(plan.node_of(rank))
        memory = np.concatenate([np.full(rows, shard) for shard in held])
        own = memory[plan.rows_of(rank, held, rows)]
        assert own.tolist() == [plan.mesh.shard_of(rank)] * rows


def test_readers_are_known_by_the_earlier_name_too_and_unknown_ones_refused_with_the_nearest() -> None:
    assert ReadPlan(ParallelMesh(2, 1, 1), "data_parallel") == ReadPlan(ParallelMesh(2, 1, 1), "every_rank")
    with pytest.raises(ConfigError, match=r"readers is 'nodes'.*Did you mean 'node'"):
        ReadPlan(ParallelMesh(1, 1, 1), "nodes")


@given(plans(), st.integers(-5, 5))
def test_a_field_is_sent_exactly_where_a_rank_of_its_stage_is(plan: ReadPlan, layer: int) -> None:
    for node in range(plan.mesh.num_nodes):
        try:
            holders = set(plan.mesh.layer_ranks(layer))
        except MeshError:
            holders = set(ranks_of(plan))  # no such layer: said where the tensor is made global
        needed = not holders.isdisjoint(plan.ranks_of(node))
        assert plan.is_sent_to(node, layer) == (needed or plan.readers != "rank0" or node == 0)


@given(plans(), st.integers(1, 5))
def test_samples_are_read_and_sent_as_often_as_the_read_mode_says(plan: ReadPlan, rows: int) -> None:
    costs = [node_traffic(plan, node, FIELDS, rows) for node in range(plan.mesh.num_nodes)]
    batch = rows * plan.mesh.data_parallel_size
    assert sum(cost.samples_read for cost in costs) == times_read(plan) * batch
    assert sum(cost.bytes_read for cost in costs) == times_read(plan) * batch * EACH
    assert all(cost.bytes_received == 0 for cost in costs) == (plan.readers != "rank0" or plan.mesh.num_nodes == 1)
    assert sum(cost.bytes_sent for cost in costs) == sum(cost.bytes_received for cost in costs)
    if plan.readers == "rank0":
        assert times_read(plan) == 1 and costs[0].bytes_kept == batch * EACH


def test_fields_of_the_last_stage_and_parts_of_samples_are_received_or_read_by_those_who_need_them() -> None:
    plan = ReadPlan(ParallelMesh(2, 1, 2, num_nodes=2), "rank0")
    assert node_traffic(plan, 1, FIELDS, 3).bytes_received == 2 * 3 * 8
    mesh = ParallelMesh(1, 4, 1)
    fields = (FieldSize("tokens", 4096, read_parts=4),)
    assert node_traffic(ReadPlan(mesh, "every_rank"), 0, fields, 2).bytes_read == 2 * 4096
    assert node_traffic(ReadPlan(mesh, "node"), 0, fields, 2).bytes_read == 2 * 4096
