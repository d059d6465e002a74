from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Callable

import numpy as np
import oneflow as flow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from libai_data import DataLoader
from libai_data.delivery import to_global
from libai_data.engine.batches import join_inputs
from libai_data.errors import SchemaError
from libai_data.iterables.combined import CombinedLoader
from libai_data.mesh.arrays import as_array, is_flow_tensor
from libai_data.structures import (
    DEFAULT_SBP,
    BatchInfo,
    DistTensorData,
    Instance,
    NamedBatch,
    Origin,
    batch_info,
    fields_of,
)

DTYPES = ["bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64"]
names = st.lists(st.sampled_from(["images", "labels", "tokens", "mask", "boxes"]), min_size=1, unique=True)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
CLONES = [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
TensorMaker = Callable[[np.ndarray], Any]


@st.composite
def samples(draw: st.DrawFn) -> list[dict[str, np.ndarray]]:
    """A few samples with the same fields, shapes and dtypes."""
    arrays = {name: (draw(st.sampled_from(DTYPES)), draw(shapes)) for name in draw(names)}
    count = draw(st.integers(1, 4))
    return [{name: draw(hnp.arrays(dtype, shape)) for name, (dtype, shape) in arrays.items()} for _ in range(count)]


@pytest.fixture(params=["numpy", "oneflow"])
def tensor(request: pytest.FixtureRequest) -> TensorMaker:
    return np.asarray if request.param == "numpy" else lambda array: flow.from_numpy(np.asarray(array))


def numpy_of(value: Any) -> np.ndarray:
    return value.numpy() if is_flow_tensor(value) else value


@given(samples(), st.sampled_from(["array", "tensor", "wrapped array", "wrapped tensor"]))
def test_stacking_puts_each_sample_bit_for_bit_into_its_row_and_keeps_the_dtype(
    batch: list[dict[str, np.ndarray]], kind: str
) -> None:
    def made(array: np.ndarray) -> Any:
        value = flow.from_numpy(array) if kind.endswith("tensor") else array
        return DistTensorData(value, ["split_0", "split_1"], -1) if kind.startswith("wrapped") else value

    if kind.endswith("tensor") and any(0 in array.shape for array in batch[0].values()):
        return  # OneFlow stacks no empty tensors
    stacked = Instance.stack([Instance(**{name: made(array) for name, array in one.items()}) for one in batch])
    assert list(stacked.get_fields()) == list(batch[0])
    for name in batch[0]:
        value = stacked.get(name)
        if kind.startswith("wrapped"):
            assert (value.sbp_list, value.placement_idx) == (["split_0", "split_1"], -1)
            value = value.tensor
        expected = np.stack([one[name] for one in batch])
        found = numpy_of(value)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()


@given(samples(), st.randoms())
def test_the_order_in_which_samples_name_their_fields_does_not_matter(
    batch: list[dict[str, np.ndarray]], random: Any
) -> None:
    expected = Instance.stack([Instance(**one) for one in batch])
    shuffled = [Instance(**batch[0])]
    for one in batch[1:]:
        items = list(one.items())
        random.shuffle(items)
        shuffled.append(Instance(**dict(items)))
    found = Instance.stack(shuffled)
    assert list(found.get_fields()) == list(expected.get_fields())
    assert all(found.get(name).tobytes() == expected.get(name).tobytes() for name in found.get_fields())


@given(samples(), st.data())
def test_a_sample_that_lacks_a_field_is_refused_by_field_and_sample(
    batch: list[dict[str, np.ndarray]], data: st.DataObject
) -> None:
    row = data.draw(st.integers(1, len(batch)))
    name = data.draw(st.sampled_from(sorted(batch[0])))
    odd = {key: value for key, value in batch[0].items() if key != name}
    instances = [Instance(**one) for one in [*batch[:row], odd, *batch[row:]]]
    with pytest.raises(SchemaError) as error:
        Instance.stack(instances)
    assert f"sample {row}" in str(error.value)
    assert f"missing ['{name}']" in str(error.value)


def test_a_field_that_the_first_sample_lacks_is_refused_by_field_and_sample() -> None:
    with pytest.raises(SchemaError, match=r"sample 1 .*unexpected \['extra'\]"):
        Instance.stack([Instance(x=1), Instance(x=1, extra=2)])


@pytest.mark.parametrize("wrap", [lambda value: value, DistTensorData], ids=["bare", "wrapped"])
def test_shapes_and_dtypes_that_differ_are_refused_by_field_sample_and_both_values(
    tensor: TensorMaker, wrap: Callable[[Any], Any]
) -> None:
    def batch(*arrays: np.ndarray) -> list[Instance]:
        return [Instance(other=wrap(tensor(np.zeros(1))), x=wrap(tensor(array))) for array in arrays]

    with pytest.raises(SchemaError, match=r"field 'x'.*sample 0 has \[2, 3\], sample 2 has \[3, 2\]"):
        Instance.stack(batch(np.zeros((2, 3)), np.ones((2, 3)), np.zeros((3, 2))))
    with pytest.raises(SchemaError, match=r"field 'x'.*sample 0 has .*float32, sample 1 has .*float64"):
        Instance.stack(batch(np.zeros(2, np.float32), np.zeros(2, np.float64)))


@pytest.mark.parametrize(("sbp_list", "placement_idx"), [(["split_0", "split_1"], 0), (["split_0", "broadcast"], -1)])
def test_layouts_that_differ_are_refused_by_field_and_sample(
    tensor: TensorMaker, sbp_list: list[str], placement_idx: int
) -> None:
    usual = DistTensorData(tensor(np.zeros(2)))
    odd = DistTensorData(tensor(np.zeros(2)), sbp_list, placement_idx)
    with pytest.raises(SchemaError, match=f"field 'x'.*sample 0 .* sample 1 has .* on layer {placement_idx}"):
        Instance.stack([Instance(x=usual), Instance(x=odd)])


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2], "int64"),
        ([-1.5, 2.0], "float32"),
        ([True, False], "bool"),
        ([[1, 2], [3, 4]], "int64"),
        ([[1, 2.5], [3, 4.5]], "float32"),
        ([(1, 2), (3, 4)], "int64"),
        ([[True], [False]], "bool"),
        ([[], []], "float32"),
        ([[[1], [2]], [[3], [4]]], "int64"),
        ([np.float64(1), np.float64(2)], "float64"),
        ([np.uint8(1), np.uint8(2)], "uint8"),
        ([[np.float64(1)], [np.float64(2)]], "float64"),
        ([[np.zeros(2)], [np.ones(2)]], "float64"),
    ],
)
def test_numbers_and_lists_of_numbers_stack_with_oneflows_dtypes(values: list[Any], dtype: str) -> None:
    expected = np.asarray(values).astype(dtype)
    bare = Instance.stack([Instance(x=value) for value in values]).x
    wrapped = Instance.stack([Instance(x=DistTensorData(value)) for value in values]).x.tensor
    for found in (bare, wrapped):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, expected)


def test_numpy_stacks_with_oneflow_and_lists_of_anything_but_numbers_are_kept_one_a_sample() -> None:
    stacked = Instance.stack([Instance(x=np.ones(2, np.float32)), Instance(x=flow.zeros(2))]).x
    np.testing.assert_array_equal(stacked.numpy(), [[1, 1], [0, 0]])
    batch = Instance.stack([Instance(name=["a"], x=1), Instance(name=["b", "c"], x=2)])
    assert batch.name == [["a"], ["b", "c"]]


def test_instances_within_instances_stack_and_the_inner_field_is_named() -> None:
    batch = Instance.stack([Instance(outer=Instance(inner=np.array(row))) for row in range(3)])
    assert batch.outer.inner.tolist() == [0, 1, 2]
    with pytest.raises(SchemaError, match=r"field 'outer': field 'inner'.*sample 1"):
        Instance.stack([Instance(outer=Instance(inner=np.zeros(size))) for size in (1, 2)])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([np.zeros(2), "text"], "field 'x': sample 1.*str"),
        ([1, None], "field 'x': sample 1.*NoneType"),
        (["text", "text"], "field 'x'.*str"),
        ([None, None], "field 'x'.*NoneType"),
        ([{"a": 1}, {"a": 2}], "field 'x'.*dict"),
        ([[1, 2], [1, 2, 3]], r"field 'x'.*\[2\], sample 1 has \[3\]"),
        ([[[1], [1, 2]], [[1], [1, 2]]], "field 'x': sample 0.*ragged"),
        ([DistTensorData(1), 1], "field 'x'.*DistTensorData, sample 1 a int"),
        ([2**70, 2**70], "field 'x': sample 0"),
    ],
)
def test_what_cannot_be_stacked_is_refused_by_field_and_sample(values: list[Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        Instance.stack([Instance(x=value) for value in values])


@pytest.mark.parametrize("stackable", [Instance, DistTensorData])
def test_stacking_nothing_is_refused(stackable: Any) -> None:
    with pytest.raises(SchemaError, match="empty"):
        stackable.stack([])


def test_a_mask_is_refused_and_not_dropped() -> None:
    with pytest.raises(SchemaError, match=r"filled"):
        DistTensorData(np.ma.masked_array([1, 2], [0, 1]))


class Sparse:
    def numpy(self) -> np.ndarray:
        raise TypeError("a sparse tensor has no array")


@pytest.mark.parametrize(
    "value", ["text", None, [[1], [1, 2]], ["a"], {"a": 1}, object(), Sparse(), np.ma.masked_array([1, 2], [0, 1])]
)
def test_as_array_names_the_field_of_what_cannot_become_a_tensor(value: Any) -> None:
    with pytest.raises(SchemaError, match=r"^field 'labels' "):
        as_array(value, "labels")


def test_nothing_is_a_oneflow_tensor_while_another_thread_imports_oneflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "oneflow", ModuleType("oneflow"))
    assert not is_flow_tensor(np.zeros(1))


def test_as_array_returns_an_array_itself() -> None:
    array = np.zeros(3)
    assert as_array(array) is array


def test_stacking_leaves_the_samples_as_they_were(tensor: TensorMaker) -> None:
    # LiBai's stack of a single sample adds the batch dim to the sample's own tensor.
    sample = Instance(x=DistTensorData(tensor(np.zeros(3))))
    for _ in range(2):
        assert Instance.stack([sample]).x.shape == (1, 3)
    assert sample.x.shape == (3,)


def test_stacked_layouts_are_the_batchs_own() -> None:
    sample = Instance(x=DistTensorData(1))
    Instance.stack([sample]).x.sbp_list[1] = "split_1"
    assert sample.x.sbp_list == list(DEFAULT_SBP)
    assert DistTensorData(1).sbp_list == list(DEFAULT_SBP)


def test_an_instance_has_libais_api() -> None:
    instance = Instance(tokens=1)
    instance.mask = 2
    instance.set("labels", 3)
    assert (instance.tokens, instance.get("mask"), instance.labels) == (1, 2, 3)
    assert instance.has("mask")
    assert not instance.has("other")
    assert list(instance.get_fields().items()) == [("tokens", 1), ("mask", 2), ("labels", 3)]
    assert len(instance) == 3
    instance.remove("mask")
    assert not instance.has("mask")
    assert repr(instance) == "Instance(tokens=1, labels=3)"


def test_an_unknown_field_is_an_error_that_suggests_the_nearest() -> None:
    instance = Instance(labels=1)
    with pytest.raises(AttributeError, match=r"no field 'label'.*Did you mean 'labels'"):
        _ = instance.label
    with pytest.raises(KeyError, match="no field 'label'"):
        instance.get("label")
    with pytest.raises(KeyError, match="no field 'label'"):
        instance.remove("label")


def test_an_instance_reads_like_a_dict_of_bare_values() -> None:
    array, inner = np.arange(3), np.ones(2)
    instance = Instance(x=DistTensorData(array), y={"a": (DistTensorData(inner), 5)}, name=["one", "two"])
    assert instance["x"] is array and instance["y"]["a"][0] is inner and instance["name"] == ["one", "two"]
    assert "x" in instance and "z" not in instance and len(instance) == 3
    assert list(instance) == list(instance.keys()) == ["x", "y", "name"]
    assert dict(instance)["x"] is array and dict(instance.items()).keys() == {**instance}.keys()
    assert instance.values()[2] == ["one", "two"]
    assert isinstance(instance.get("x"), DistTensorData)
    with pytest.raises(KeyError, match="no field 'z'"):
        instance["z"]
    of_attention = Instance(keys=1, values=2, items=3)
    assert of_attention.values == 2 and of_attention.items == 3
    assert dict(of_attention) == {"keys": 1, "values": 2, "items": 3}


def test_an_instance_changes_like_a_dict_and_keeps_layouts() -> None:
    last = DistTensorData(np.arange(3), ["split_0", "split_1"], -1)
    instance = Instance(x=last, y=2)
    instance["x"], instance["z"] = np.ones(3), "text"
    assert instance["x"].sum() == 3 and instance["z"] == "text"
    assert (instance.x.sbp_list, instance.x.placement_idx) == (["split_0", "split_1"], -1)
    assert last.tensor.tolist() == [0, 1, 2]
    assert instance.pop("x").sum() == 3 and instance.pop("x", None) is None and instance.get("x", 5) == 5
    del instance["z"]
    assert dict(instance) == {"y": 2}
    for missing in (lambda: instance.pop("x"), lambda: instance.get("x"), lambda: instance.__delitem__("x")):
        with pytest.raises(KeyError, match="no field 'x'"):
            missing()
    assert Instance(pop=3).pop == 3
    instance.x = last
    with pytest.raises(SchemaError, match="field 'x': the value holds NoneType"):
        instance["x"] = None
    assert instance.x is last
    copied = instance.copy()
    copied.update({"x": np.zeros(2), "y": 4}, z=5)
    copied.update([("w", 6)])
    assert dict(instance)["y"] == 2 and instance["x"] is last.tensor
    assert (copied.x.placement_idx, copied["x"].tolist(), copied["z"], copied["w"]) == (-1, [0, 0], 5, 6)
    assert Instance(copy=3, update=4).copy == 3


def moved(batch: Any) -> Any:
    """What Hugging Face and Lightning do to each batch."""
    if isinstance(batch, Mapping):
        return type(batch)({name: moved(value) for name, value in batch.items()})  # type: ignore[call-arg]
    return [moved(value) for value in batch] if isinstance(batch, (list, tuple)) else batch


def test_a_batch_of_samples_with_names_is_a_mapping_to_other_peoples_code() -> None:
    sample = {"x": 1, "of": {"y": 2.0, "name": "a"}}
    for batch in DataLoader([sample, sample], 2):
        again = moved(batch)
        assert isinstance(again, Instance) and list(again) == ["x", "of"] and batch_info(batch) is not None
        assert to_global(again)["of"]["y"].numpy().tolist() == [2, 2]
    (unnamed,) = DataLoader([(1, 2), (1, 2)], 2)
    assert not isinstance(unnamed, Mapping) and moved(unnamed) is unnamed
    for clone in CLONES:
        cloned = clone(NamedBatch({"x": 1}, y=2))
        assert isinstance(cloned, Mapping) and dict(cloned) == {"x": 1, "y": 2}


def test_a_batch_within_a_batch_stays_one() -> None:
    both = CombinedLoader({"a": DataLoader([{"x": 1}] * 2, 2), "b": DataLoader([(1, 2)] * 2, 2)})
    batch = next(iter(both))
    assert isinstance(batch, Mapping) and isinstance(batch["a"], Mapping) and not isinstance(batch["b"], Mapping)
    assert to_global(batch)["a"]["x"].is_global
    x, y = to_global(batch)["b"]
    assert x.is_global and y.is_global
    joined = join_inputs([to_global(batch), to_global(batch)])
    assert joined["a"]["x"].numpy().tolist() == [1] * 4
    x, y = joined["b"].values()
    assert y.numpy().tolist() == [2] * 4


@pytest.mark.parametrize("clone", CLONES)
def test_a_copy_of_an_instance_is_equal_and_a_change_to_it_leaves_the_instance_as_it_is(
    clone: Callable[[Any], Any],
) -> None:
    instance = Instance(x=DistTensorData(np.arange(3), ["split_0", "split_1"], -1), y=DistTensorData(np.zeros(2)))
    copied = clone(instance)
    assert copied.x.tensor.tolist() == [0, 1, 2]
    assert (copied.x.sbp_list, copied.x.placement_idx) == (["split_0", "split_1"], -1)
    copied.z = 1
    copied.remove("x")
    copied.set("y", 2)
    assert list(instance.get_fields()) == ["x", "y"]
    assert instance.y.tensor.tolist() == [0, 0]


def test_dist_tensor_data_takes_numpy_and_oneflow_tensors_as_they_are(tensor: TensorMaker) -> None:
    value = tensor(np.zeros((2, 3)))
    assert DistTensorData(value).tensor is value
    assert DistTensorData(value).shape == (2, 3)


def test_dist_tensor_data_becomes_global_in_place_by_its_layout_or_the_given_one(tensor: TensorMaker) -> None:
    placement = flow.placement("cpu", [0])
    for arguments in ({}, {"sbp": flow.sbp.split(0), "placement": placement}, {"device_type": "cpu"}):
        data = DistTensorData(tensor(np.arange(6).reshape(2, 3)), placement_idx=-1)
        data.to_global(**arguments)
        assert data.tensor.is_global
        assert data.tensor.numpy().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_only_a_loaders_batches_carry_a_place_in_the_stream() -> None:
    batch = Instance(x=1)
    assert batch_info(batch) is None
    assert batch_info({"x": 1}) is None
    batch.attach(Origin(BatchInfo(step=1, epoch=0, position=4, size=4, valid=4)))
    assert batch_info(batch) == BatchInfo(1, 0, 4, 4, 4)
    assert len(batch) == 1


class OthersTensor:
    """A tensor with a layout, of a class that is not ours; LiBai's has these attributes."""

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.sbp_list, self.placement_idx = tensor, ["broadcast", "split_1"], -1


class OthersInstance:
    """Named fields, of a class that is not ours."""

    def get_fields(self) -> dict[str, Any]:
        return {"tokens": OthersTensor(np.arange(3)), "number": 4}


def test_a_sample_is_an_instance_or_a_dict_or_of_libais_classes_with_their_layouts() -> None:
    fields = fields_of(OthersInstance())  # type: ignore[arg-type]
    assert isinstance(fields["tokens"], DistTensorData)
    assert fields["tokens"].sbp_list == ["broadcast", "split_1"]
    assert fields["tokens"].placement_idx == -1
    assert (fields["tokens"].tensor == np.arange(3)).all()
    assert fields["number"] == 4
    assert fields_of(Instance(x=1)) == {"x": 1}
    assert fields_of({"x": 1}) == {"x": 1}
    with pytest.raises(SchemaError, match="got tuple"):
        fields_of((1, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [[2**63, 1], [[1, 2], [3, 2**64 - 1]], [2.5, 2**63]])
def test_a_list_of_integers_never_becomes_inexact_floats(values: list[Any]) -> None:
    with pytest.raises(SchemaError, match="field 'ids' is a list with integers beyond int64"):
        as_array(values, "ids")
    assert as_array([1, 1e20, 2.5]).dtype == np.float32
    for large in (2**64, -(2**63) - 1, [2**70], [[1], [2**64]]):
        with pytest.raises(SchemaError, match="field 'ids' holds integers beyond int64"):
            as_array(large, "ids")


@pytest.mark.parametrize("values", [1e300, -1e39, [1.0, 1e300], [float("nan"), float("inf"), -1e39], [[1e39], [0.5]]])
def test_a_float_beyond_float32_is_refused_instead_of_becoming_infinite(values: Any) -> None:
    with pytest.raises(SchemaError, match=r"field 'x' holds -?1e\+\d+, but Python floats become float32"):
        as_array(values, "x")


@pytest.mark.parametrize("values", [float("inf"), float("nan"), 3.4e38, [float("-inf"), float("nan"), 1.5], []])
def test_floats_that_float32_has_are_accepted(values: Any) -> None:
    assert as_array(values).dtype == np.float32
    np.testing.assert_array_equal(as_array(values), np.float32(values))


def test_an_update_by_an_instance_keeps_the_layouts_of_both() -> None:
    batch = Instance(x=DistTensorData(np.zeros(2), placement_idx=-1))
    batch.update(Instance(labels=DistTensorData(np.ones(2), placement_idx=-1)), x=np.ones(2))
    assert (batch.labels.placement_idx, batch.x.placement_idx, batch["x"].tolist()) == (-1, -1, [1, 1])
