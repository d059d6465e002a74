from __future__ import annotations

import re
from typing import Any

import numpy as np
import oneflow as flow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from libai_data.errors import MeshError, SchemaError
from libai_data.mesh.arrays import as_flow_tensor
from libai_data.mesh.global_tensor import global_shape, local_to_global, split_dims
from libai_data.mesh.parallel_mesh import ParallelMesh

DTYPES = ["bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64"]
entries = st.one_of(st.just("broadcast"), st.integers(0, 3).map("split_{}".format))
signatures = st.tuples(entries, entries).map(list)
arrays = st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(max_dims=4, max_side=4)))


@given(arrays)
def test_an_array_of_any_of_oneflows_dtypes_becomes_global_bit_for_bit(array: np.ndarray) -> None:
    found = local_to_global(array, ["split_0", "broadcast"])
    assert found.is_global
    assert found.numpy().dtype == array.dtype
    assert found.numpy().tobytes() == array.tobytes()


@given(arrays, st.data())
def test_views_of_any_strides_and_offsets_keep_their_values(array: np.ndarray, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, array.shape[0] - 1))
    for view in (array[start:], array.T, array[::-1], array[..., ::2]):
        np.testing.assert_array_equal(local_to_global(view, ["broadcast", "broadcast"]).numpy(), view)
    tensor = flow.from_numpy(array)
    for one, other in ((tensor[start:], array[start:]), (tensor.permute(*range(array.ndim)[::-1]), array.T)):
        np.testing.assert_array_equal(local_to_global(one, ["split_0", "broadcast"]).numpy(), other)


@given(signatures)
def test_a_signature_is_parsed_to_the_dims_that_it_splits(sbp_list: list[str]) -> None:
    dims = split_dims(sbp_list)
    assert ["broadcast" if dim is None else f"split_{dim}" for dim in dims] == sbp_list


@pytest.mark.parametrize("sbp_list", ["split_0", [], ["split_0"], ["split_0"] * 3, None, 3])
def test_a_signature_takes_one_entry_for_each_axis(sbp_list: Any) -> None:
    with pytest.raises(SchemaError, match="one entry for each of the axes"):
        split_dims(sbp_list)


@pytest.mark.parametrize(
    "entry", ["split", "split_", "split_x", "split_-1", "S(0)", "partial_sum", "Broadcast", None, 0]
)
def test_an_unknown_entry_is_refused_by_axis(entry: Any) -> None:
    with pytest.raises(SchemaError, match=re.escape(f"{entry!r} for the tensor axis")):
        split_dims(["broadcast", entry])
    with pytest.raises(SchemaError, match="for the data axis"):
        split_dims([entry, "broadcast"])


@given(
    st.lists(st.integers(1, 24), min_size=1, max_size=4).map(tuple), signatures, st.integers(1, 4), st.integers(1, 4)
)
def test_a_layout_is_accepted_just_when_each_rank_gets_an_equal_part(
    shard: tuple[int, ...], sbp_list: list[str], data: int, tensor: int
) -> None:
    mesh = ParallelMesh(data, tensor, 1)
    whole = np.empty((shard[0] * data, *shard[1:]), dtype=np.bool_)
    try:
        part = whole
        for dim, size in zip(split_dims(sbp_list), (data, tensor)):
            if dim is not None:
                part = np.split(part, size, axis=dim)[0]
    except (ValueError, IndexError):
        with pytest.raises(SchemaError, match=r"cannot be split evenly|the tensor has \d dims"):
            global_shape(shard, sbp_list, mesh)
    else:
        assert global_shape(shard, sbp_list, mesh) == whole.shape


def test_a_dim_that_does_not_divide_is_refused_with_dim_sizes_and_axis() -> None:
    with pytest.raises(SchemaError, match=r"dim 1 of size 5 .* into 2 parts \(the tensor axis has size 2\).*broadcast"):
        global_shape((4, 5), ["split_0", "split_1"], ParallelMesh(1, 2, 1))
    with pytest.raises(SchemaError, match=r"dim 0 of size 6 .* into 4 parts"):
        global_shape((3, 5), ["split_0", "split_0"], ParallelMesh(2, 2, 1))


@pytest.mark.parametrize(
    ("array", "device", "message"),
    [
        (np.zeros(()), "cpu", "no batch dim"),
        (np.ma.masked_array(np.zeros(2), [True, False]), "cpu", "a masked array cannot become a tensor"),
        (np.zeros(2), "tpu", "device_type is 'tpu'; it must be 'cuda' or 'cpu'"),
        *(
            (np.zeros(2, dtype), "cpu", f"no tensors of dtype {dtype}; convert the field to .*int64")
            for dtype in ("int16", "uint16", "uint32", "uint64", "complex64")
        ),
    ],
)
def test_what_cannot_become_global_is_refused_with_what_can(array: np.ndarray, device: Any, message: str) -> None:
    with pytest.raises((MeshError, SchemaError), match=message):
        local_to_global(array, ["split_0", "broadcast"], device_type=device)


def test_a_contiguous_array_is_shared_and_not_copied() -> None:
    array = np.zeros(4, np.float32)
    tensor = as_flow_tensor(array)
    array[0] = 7
    assert tensor.numpy()[0] == 7
    assert as_flow_tensor(tensor) is tensor


def test_a_global_tensor_is_moved_to_the_layout() -> None:
    tensor = flow.ones(2, 3).to_global(placement=flow.placement("cpu", [0]), sbp=flow.sbp.split(0))
    assert local_to_global(tensor, ["broadcast", "broadcast"]).shape == (2, 3)
