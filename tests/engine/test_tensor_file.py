from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from libai_data.engine.checkpoint.directory import CheckedFile
from libai_data.engine.checkpoint.tensor_file import TensorFile, tensor_header, write_tensor
from libai_data.errors import CheckpointError


def write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    header, order = tensor_header(arrays)
    with open(path, "wb") as opened:
        file = CheckedFile(opened)
        file.write(header)
        for name in order:
            write_tensor(file, arrays[name])


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {
        dtype: (rng.standard_normal((3, 5)) * 10).astype(dtype)
        for dtype in ("bool", "int8", "uint8", "float16", "int32", "float32", "int64", "float64")
    }
    found["scalar"] = np.array(3, np.int64)
    found["empty"] = np.zeros((0, 4), np.float32)
    found["a/b.c"] = np.asfortranarray(rng.standard_normal((4, 3)).astype(np.float32))
    return found


def test_what_is_written_is_read_back_by_the_safetensors_library_too(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    write(tmp_path / "t", arrays)
    loaded, file = load_file(tmp_path / "t"), TensorFile(tmp_path / "t")
    assert sorted(loaded) == sorted(file.names()) == sorted(arrays)
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        assert file.shape(name) == array.shape
        np.testing.assert_array_equal(loaded[name], array)
        np.testing.assert_array_equal(file.read(name), array)


@given(st.tuples(*[st.tuples(st.integers(0, 4), st.integers(0, 4)) for _ in range(2)]))
def test_a_part_is_read_alone(tmp_path_factory: pytest.TempPathFactory, bounds: tuple) -> None:
    path = tmp_path_factory.getbasetemp() / "parts"
    whole = np.arange(16, dtype=np.float32).reshape(4, 4)
    if not path.exists():
        write(path, {"x": whole})
    part = tuple(slice(min(pair), max(pair)) for pair in bounds)
    if any(each.start == each.stop for each in part):
        return
    np.testing.assert_array_equal(TensorFile(path).read("x", part), whole[part])


def test_a_file_of_another_kind_and_a_dtype_that_has_no_place_are_named(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"nonsense" * 4)
    with pytest.raises(CheckpointError, match=str(tmp_path / "t")):
        TensorFile(tmp_path / "t")
    with pytest.raises(CheckpointError, match="'x' has dtype complex64"):
        tensor_header({"x": np.zeros(2, np.complex64)})
