from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import oneflow as flow
import pytest

from libai_data.delivery import to_global
from libai_data.errors import MeshError, SchemaError
from libai_data.mesh import ParallelMesh, get_mesh, set_mesh
from libai_data.structures import DistTensorData, Instance


@pytest.fixture()
def two_stages() -> Iterator[None]:
    before = get_mesh()
    set_mesh(ParallelMesh(1, 1, 2, layer_stage_ids=(0, 1)))
    yield
    set_mesh(before)


def test_fields_become_global_tensors_in_their_order_and_with_their_dtypes() -> None:
    batch = Instance(
        images=DistTensorData(np.arange(8, dtype=np.uint8).reshape(2, 4), ["split_0", "split_1"]),
        labels=DistTensorData(flow.tensor([3, 4]), placement_idx=-1),
        weights=np.ones(2, np.float16),
        flags=[True, False],
    )
    tensors = to_global(batch)
    assert list(tensors) == ["images", "labels", "weights", "flags"]
    assert all(tensor.is_global for tensor in tensors.values())
    assert [str(tensor.dtype) for tensor in tensors.values()] == [
        "oneflow.uint8",
        "oneflow.int64",
        "oneflow.float16",
        "oneflow.bool",
    ]
    assert tensors["images"].numpy().tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert tensors["labels"].numpy().tolist() == [3, 4]


def test_a_dict_serves_as_a_batch_and_stays_as_it_was() -> None:
    batch = {"x": np.ones((2, 3))}
    assert to_global(batch)["x"].shape == (2, 3)
    assert isinstance(batch["x"], np.ndarray)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text", "field 'x'.*str"),
        (None, "field 'x'.*NoneType"),
        (np.zeros(2, np.uint16), "field 'x'.*uint16"),
        (np.float32(1), "field 'x'.*no batch dim.*repeat a number"),
        (DistTensorData(np.zeros(2), ["split_0", "split_1"]), "field 'x'.*tensor axis splits dim 1, .*1 dims"),
        (DistTensorData(np.zeros(2), ["split_0", "sum"]), "field 'x'.*'sum' for the tensor axis"),
        (DistTensorData(np.zeros(2), ["split_0"]), "field 'x'.*one entry for each"),
    ],
)
def test_what_does_not_fit_is_refused_by_field(value: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        to_global({"fits": np.zeros(2), "x": value})


def test_a_batch_that_has_no_named_fields_is_refused() -> None:
    with pytest.raises(SchemaError, match="dict of named fields, got list"):
        to_global([np.zeros(2)])  # type: ignore[arg-type]


def test_a_layer_that_the_mesh_lacks_is_refused_by_field(two_stages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # The other rank agrees.
    monkeypatch.setattr("libai_data.delivery.contract.gather_words", lambda words: words[None])
    with pytest.raises(MeshError, match="field 'x': There is no layer 7"):
        to_global({"x": DistTensorData(np.zeros(2), placement_idx=7)})


def test_another_thread_than_the_main_one_is_refused() -> None:
    message = "^to_global was called in the thread 'reader_0'; OneFlow makes global tensors on the main"
    with ThreadPoolExecutor(1, "reader") as threads, pytest.raises(MeshError, match=message):
        threads.submit(to_global, {"x": np.ones(2)}).result()
