from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import oneflow as flow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from libai_data.errors import ConfigError, MeshError
from libai_data.mesh.current import (
    broadcast_py_object,
    get_data_parallel_rank,
    get_data_parallel_size,
    get_layer_placement,
    get_mesh,
    get_nd_sbp,
    init,
    is_last_process,
    is_main_process,
    set_mesh,
    setup_dist_util,
)
from libai_data.mesh.global_tensor import local_to_global
from libai_data.mesh.parallel_mesh import ParallelMesh, spread_layers
from tests.deadline import run_to_end

sizes = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))


@pytest.fixture()
def no_mesh() -> Iterator[None]:
    before = get_mesh()
    set_mesh(None)
    yield
    set_mesh(before)


def all_ranks(shape: tuple[int, int, int]) -> list[ParallelMesh]:
    mesh = ParallelMesh(*shape)
    return [dataclasses.replace(mesh, rank=rank) for rank in range(mesh.world_size)]


def coordinates(mesh: ParallelMesh) -> tuple[int, int, int]:
    return mesh.pipeline_parallel_rank, mesh.data_parallel_rank, mesh.tensor_parallel_rank


@given(sizes)
def test_ranks_and_coordinates_are_one_to_one_with_tensor_innermost_and_pipeline_outermost(
    shape: tuple[int, int, int],
) -> None:
    data, tensor, pipeline = shape
    expected = list(itertools.product(range(pipeline), range(data), range(tensor)))
    assert [coordinates(mesh) for mesh in all_ranks(shape)] == expected


@given(sizes)
def test_stages_partition_the_ranks(shape: tuple[int, int, int]) -> None:
    meshes = all_ranks(shape)
    stages = [meshes[0].ranks_of_stage(stage) for stage in range(shape[2])]
    assert [rank for stage in stages for rank in stage] == list(range(len(meshes)))
    assert all(mesh.rank in stages[mesh.pipeline_parallel_rank] for mesh in meshes)


@given(st.integers(1, 12), st.integers(0, 60))
def test_layers_spread_contiguously_evenly_and_with_the_remainder_on_later_stages(stages: int, more: int) -> None:
    layers = stages + more
    spread = spread_layers(layers, stages)
    counts = [Counter(spread)[stage] for stage in range(stages)]
    assert len(spread) == layers
    assert list(spread) == sorted(spread)
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.sampled_from([None, 0, 1, 2]))
def test_any_two_sizes_determine_the_third(data: int, tensor: int, pipeline: int, left_out: Any) -> None:
    keys = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
    cfg: dict[str, Any] = dict(zip(keys, (data, tensor, pipeline)), pipeline_num_layers=8)
    if left_out is not None:
        cfg[keys[left_out]] = None
    mesh = ParallelMesh.from_config(cfg, world_size=data * tensor * pipeline)
    assert (mesh.data_parallel_size, mesh.tensor_parallel_size, mesh.pipeline_parallel_size) == (data, tensor, pipeline)


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        ({}, (4, 1, 1)),
        ({"tensor_parallel_size": 2}, (2, 2, 1)),
        ({"data_parallel_size": 2}, (2, 2, 1)),
        ({"pipeline_parallel_size": 2, "pipeline_num_layers": 4}, (2, 1, 2)),
    ],
)
def test_sizes_left_out_become_one_and_the_data_axis_takes_the_rest(
    cfg: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    mesh = ParallelMesh.from_config(cfg, world_size=4)
    assert (mesh.data_parallel_size, mesh.tensor_parallel_size, mesh.pipeline_parallel_size) == expected


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 36))
def test_sizes_that_do_not_multiply_to_the_world_size_are_refused_with_the_numbers(
    data: int, tensor: int, world_size: int
) -> None:
    cfg = {"data_parallel_size": data, "tensor_parallel_size": tensor, "pipeline_parallel_size": 1}
    if data * tensor == world_size:
        assert ParallelMesh.from_config(cfg, world_size=world_size).world_size == world_size
        return
    with pytest.raises(MeshError) as error:
        ParallelMesh.from_config(cfg, world_size=world_size)
    for part in (f"data_parallel_size={data}", f"tensor_parallel_size={tensor}", str(data * tensor), str(world_size)):
        assert part in str(error.value)


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", True])
def test_a_size_that_is_no_count_is_refused_by_key(size: Any) -> None:
    with pytest.raises(ConfigError, match="train.dist.tensor_parallel_size is " + repr(size)):
        ParallelMesh.from_config({"tensor_parallel_size": size}, world_size=4)
    with pytest.raises(MeshError, match="tensor_parallel_size is " + repr(size)):
        ParallelMesh(1, size, 1)


@pytest.mark.parametrize("rank", [-1, 4, None])
def test_a_rank_outside_the_mesh_is_refused(rank: Any) -> None:
    with pytest.raises(MeshError, match=r"rank is .*0 to 3"):
        ParallelMesh(2, 2, 1, rank=rank)


def test_ranks_that_do_not_divide_over_the_nodes_are_refused() -> None:
    with pytest.raises(MeshError, match="num_nodes=3"):
        ParallelMesh(2, 2, 1, num_nodes=3)


STAGES = "train.dist.custom_pipeline_stage_id"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"tensor_parallel_size": 3, "pipeline_parallel_size": 1},
            "tensor_parallel_size=3, pipeline_parallel_size=1, and 3 does not divide the 2",
        ),
        ({"tensor_paralel_size": 2}, r"train\.dist\.tensor_paralel_size.*tensor_parallel_size"),
        ({"device_type": "tpu"}, r"train\.dist\.device_type is 'tpu'; it must be 'cuda' or 'cpu'"),
        ({"pipeline_parallel_size": 2}, r"train\.dist\.pipeline_num_layers is missing"),
        *(
            (
                {"pipeline_parallel_size": 2, "pipeline_num_layers": layers},
                f"train.dist.pipeline_num_layers is {layers}",
            )
            for layers in (1, 0, 2.5)
        ),
        *(
            (
                {"pipeline_parallel_size": 2, "pipeline_num_layers": 4, "custom_pipeline_stage_id": stages},
                f"{STAGES}.*{culprit}",
            )
            for stages, culprit in [
                ([0, 0, 1], "has 3 entries, but train.dist.pipeline_num_layers is 4"),
                ([0, 0, 1, 2], r"\[3\] is 2, but"),
                ([0, 0, 1, -1], r"\[3\] is -1, but"),
                ([0, 0, 1, "1"], r"\[3\] is '1', but"),
                ([0, 1, 0, 1], r"\[2\] is 0 after 1"),
                ([0, 0, 0, 0], r"no layer to stage\(s\) \[1\]"),
                ([1, 1, 1, 1], r"no layer to stage\(s\) \[0\]"),
                (3, "is 3; it must be a list"),
            ]
        ),
    ],
)
def test_what_makes_no_mesh_of_two_ranks_is_refused_by_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, MeshError), match=message):
        ParallelMesh.from_config(keys, world_size=2)


def test_custom_stages_decide_where_layers_are() -> None:
    cfg = {"pipeline_parallel_size": 2, "pipeline_num_layers": 4, "custom_pipeline_stage_id": [0, 0, 0, 1]}
    mesh = ParallelMesh.from_config(cfg, world_size=4)
    assert [mesh.layer_stage(i) for i in range(4)] == [0, 0, 0, 1]
    assert mesh.layer_ranks(2) == (0, 1)
    assert mesh.layer_ranks(3) == (2, 3)


@given(st.integers(2, 6), st.integers(0, 20), st.data())
def test_a_negative_layer_counts_from_the_end(stages: int, more: int, data: st.DataObject) -> None:
    layers = stages + more
    cfg = {"pipeline_parallel_size": stages, "pipeline_num_layers": layers}
    mesh = ParallelMesh.from_config(cfg, world_size=stages)
    layer = data.draw(st.integers(0, layers - 1))
    assert mesh.layer_stage(layer - layers) == mesh.layer_stage(layer)
    assert mesh.layer_stage(-1) == stages - 1
    for outside in (layers, -layers - 1):
        with pytest.raises(MeshError, match=f"no layer {outside}"):
            mesh.layer_stage(outside)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("layer", ["0", 0.5, None, True])
def test_a_layer_that_is_no_int_is_refused_on_every_mesh(stages: int, layer: Any) -> None:
    with pytest.raises(MeshError, match=rf"placement_idx of a field\) is {layer!r}; it must be an int"):
        ParallelMesh(1, 1, stages).layer_stage(layer)


def test_without_a_pipeline_any_layer_is_on_the_one_stage() -> None:
    mesh = ParallelMesh(2, 2, 1)
    assert [mesh.layer_ranks(layer) for layer in (0, -1, 7, 10**4)] == [(0, 1, 2, 3)] * 4


@pytest.mark.parametrize(
    ("asked", "gpu_available", "expected"),
    [(None, False, "cpu"), (None, True, "cuda"), ("cuda", False, "cpu"), ("cuda", True, "cuda"), ("cpu", True, "cpu")],
)
def test_cpu_is_taken_when_asked_for_or_without_a_gpu(asked: Any, gpu_available: bool, expected: str) -> None:
    mesh = ParallelMesh.from_config({"device_type": asked}, gpu_available=gpu_available)
    assert mesh.device_type == expected


def test_setup_writes_the_sizes_in_use_back(no_mesh: None) -> None:
    cfg = OmegaConf.create({"data_parallel_size": None, "tensor_parallel_size": None, "pipeline_parallel_size": 1})
    OmegaConf.set_struct(cfg, True)
    mesh = setup_dist_util(cfg)
    assert get_mesh() == mesh
    assert dict(cfg) == {
        "data_parallel_size": 1,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "num_nodes": 1,
        "num_gpus_per_node": 1,
    }


@pytest.mark.parametrize("key", ["num_nodes", "num_gpus_per_node"])
def test_another_number_of_nodes_than_the_job_has_is_refused(no_mesh: None, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.dist\.{key} is 2, but the job was started with 1.*remove the key"):
        setup_dist_util({key: 2})
    assert setup_dist_util({key: 1}).world_size == 1


def test_a_set_mesh_is_not_set_up_to_another_value(no_mesh: None) -> None:
    set_mesh(ParallelMesh(2, 2, 1, rank=3))
    with pytest.raises(MeshError, match="already has the mesh"):
        setup_dist_util({})
    assert (get_data_parallel_size(), get_data_parallel_rank(), is_main_process(), is_last_process()) == (
        2,
        1,
        False,
        True,
    )


def test_the_missing_gpu_is_said_once(no_mesh: None, caplog: pytest.LogCaptureFixture) -> None:
    if flow.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with caplog.at_level("INFO", logger="libai_data.mesh.current"):
        setup_dist_util({"device_type": "cuda"})
        setup_dist_util({"device_type": "cuda"})
    assert [record.message for record in caplog.records] == [
        "There is no GPU: the job runs on the CPU (train.dist.device_type)."
    ]


@pytest.mark.parametrize(
    ("shape", "kept"), [((2, 2, 1), [0, 1]), ((2, 1, 1), [0]), ((1, 2, 1), [1]), ((1, 1, 2), None)]
)
def test_an_nd_sbp_keeps_the_axes_that_the_mesh_has(no_mesh: None, shape: tuple[int, int, int], kept: Any) -> None:
    both = [flow.sbp.split(0), flow.sbp.split(1)]
    set_mesh(ParallelMesh(*shape))
    assert get_nd_sbp(both) == ([both[i] for i in kept] if kept is not None else [flow.sbp.broadcast])


def test_an_nd_sbp_of_another_length_or_type_is_refused(no_mesh: None) -> None:
    with pytest.raises(ValueError, match="must have two entries"):
        get_nd_sbp([flow.sbp.broadcast])
    with pytest.raises(TypeError, match="'split_0'"):
        get_nd_sbp(["split_0", flow.sbp.broadcast])


def test_a_tensor_and_an_object_on_one_rank_are_placed_and_broadcast(no_mesh: None) -> None:
    tensor = flow.zeros(2, placement=get_layer_placement(-1), sbp=get_nd_sbp([flow.sbp.split(0), flow.sbp.broadcast]))
    assert tensor.numpy().tolist() == [0, 0]
    sent = {"a": [1, 2]}
    received = broadcast_py_object(sent)
    assert received == sent
    assert received["a"] is not sent["a"]
    for src in (1, -1, None):
        with pytest.raises(MeshError, match=f"src is {src}; it must be an int, 0 to 0"):
            broadcast_py_object(sent, src=src)  # type: ignore[arg-type]


def libais(**sizes: Any) -> SimpleNamespace:
    """LiBai's module of the mesh, after it has set up one."""
    util = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "num_nodes": 1, "_layer_stage_ids": [0] * 10000}
    return SimpleNamespace(_DIST_UTIL=type("Util", (), {**util, **sizes})())


def test_inside_libai_the_mesh_is_libais_also_when_it_changes(no_mesh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libai.utils.distributed", SimpleNamespace(_DIST_UTIL=None))
    assert get_mesh() == ParallelMesh(1, 1, 1)
    monkeypatch.setitem(sys.modules, "libai.utils.distributed", libais(data_parallel_size=2, tensor_parallel_size=3))
    assert get_mesh() == ParallelMesh(2, 3, 1)
    piped = libais(data_parallel_size=2, pipeline_parallel_size=2, _layer_stage_ids=[0, 1, 1])
    monkeypatch.setitem(sys.modules, "libai.utils.distributed", piped)
    assert get_mesh() == ParallelMesh(2, 1, 2, layer_stage_ids=(0, 1, 1))


def test_a_mesh_that_was_set_goes_before_libais(no_mesh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libai.utils.distributed", libais(data_parallel_size=2))
    set_mesh(ParallelMesh(1, 1, 1))
    assert get_mesh() == ParallelMesh(1, 1, 1)
    rows = np.zeros((7, 1), np.float16)
    with pytest.raises(MeshError, match=r"LiBai's layers use the mesh \[2, 1, 1\] .* has \[1, 1, 1\]: import LiBai"):
        local_to_global(rows, ["split_0", "broadcast"])
    monkeypatch.setitem(sys.modules, "libai.utils.distributed", libais(data_parallel_size=1))
    assert local_to_global(rows, ["split_0", "broadcast"]).shape == rows.shape


def test_a_process_whose_world_size_is_no_number_reads_alone() -> None:
    program = "from libai_data.mesh.current import get_mesh; print(get_mesh().world_size)"
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "MASTER_ADDR")}
    ended = run_to_end([sys.executable, "-c", program], env={**environment, "WORLD_SIZE": "x"})
    assert ended.stdout == "1\n", ended


def test_a_mesh_of_another_rank_is_refused(no_mesh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(MeshError, match="the mesh has rank=0, but this is rank 1"):
        set_mesh(ParallelMesh(2, 1, 1))
    set_mesh(ParallelMesh(2, 1, 1, rank=1))


def test_an_error_of_init_shows_its_arguments(no_mesh: None) -> None:
    with pytest.raises(MeshError, match=r"^init\(data=1, tensor=None, pipeline=2, layers=None\): train.dist has "):
        init(data=1, pipeline=2)
