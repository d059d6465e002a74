"""Records packed into bytes come back, and other programs read their arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from libai_data.data.sources import pack_record, unpack_record
from libai_data.errors import FormatError, SchemaError
from tests.data.sources.record_files import same

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
ARRAYS = arrays.arrays(
    st.sampled_from([np.dtype(name) for name in ("bool", "u1", "i2", "u4", "i8", "f2", "f4", "f8")]),
    arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
RECORDS = st.dictionaries(st.text(max_size=4), st.binary(max_size=20) | ARRAYS | JSON, max_size=5)


@given(RECORDS)
def test_a_record_comes_back_as_it_was(record: dict[str, Any]) -> None:
    packed = pack_record(record)
    assert packed == pack_record(record)
    found = unpack_record(packed)
    assert set(found) == set(record)
    for name, value in record.items():
        if isinstance(value, np.ndarray):
            assert found[name].dtype == value.dtype and found[name].shape == value.shape
            assert found[name].tobytes() == value.tobytes()
        else:
            assert same(found[name], value)


def test_its_arrays_are_read_by_safetensors() -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = safetensors.load(pack_record({"x": x, "raw": b"ab", "label": 3}))
    assert set(found) == {"x", "raw"} and np.array_equal(found["x"], x) and found["raw"].tobytes() == b"ab"


def test_arrays_of_any_strides_and_byte_order_come_back() -> None:
    x = np.arange(24).reshape(2, 3, 4)
    views = [x.T, x[:, ::-1], x[:, :, 1:3], x[..., 1], np.broadcast_to(x[0], (2, 3, 4)), x.astype(">i8")[:, 1:]]
    found = unpack_record(pack_record({str(number): view for number, view in enumerate(views)}))
    assert [found[str(number)].tolist() for number in range(len(views))] == [view.tolist() for view in views]


@pytest.mark.parametrize("name", [1, "__metadata__"])
def test_names_that_cannot_be_packed_are_refused(name: Any) -> None:
    with pytest.raises(SchemaError, match=f"a field has the name {name!r}"):
        pack_record({name: b"x"})


@given(RECORDS, st.data())
def test_damaged_bytes_are_refused_or_give_a_record(record: dict[str, Any], data: st.DataObject) -> None:
    packed = bytearray(pack_record(record))
    place = data.draw(st.integers(0, len(packed) - 1))
    packed[place] = data.draw(st.integers(0, 255))
    for content in (bytes(packed), bytes(packed[:place])):
        try:
            assert isinstance(unpack_record(content), dict)
        except FormatError as error:
            assert "no packed record" in str(error)


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array(["text"]), [b"bytes"]])
def test_what_cannot_be_packed_is_refused_with_its_field(value: Any) -> None:
    with pytest.raises(SchemaError, match="'odd'"):
        pack_record({"fine": 1, "odd": value})
