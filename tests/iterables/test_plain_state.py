"""States as JSON: what goes in comes out, of the same types, and nothing that could run."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.errors import CheckpointError
from libai_data.iterables.plain_state import decoded, encoded

leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5), st.binary(max_size=9)
)
keys = st.one_of(st.text(max_size=4), st.just("__kind__"), st.integers(), st.tuples(st.integers(), st.text(max_size=2)))
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.tuples(inner, inner),
        st.sets(st.integers(), max_size=3),
    ),
    max_leaves=12,
)


@given(states)
def test_what_is_put_in_comes_out_as_it_was(state: Any) -> None:
    assert decoded(encoded(state)) == state
    assert type(decoded(encoded(state))) is type(state)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float64", "complex64", ">i4"])
def test_arrays_keep_dtype_shape_and_bytes(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    found = decoded(encoded({"a": array, "zero": array[:0], "scalar": array[1, 2]}))
    assert found["a"].dtype == array.dtype and found["a"].tobytes() == array.tobytes()
    assert found["zero"].shape == (0, 3)
    assert found["scalar"] == array[1, 2] and isinstance(found["scalar"], np.generic)


def test_a_set_has_one_text_in_every_process() -> None:
    """The order of a set depends on what was put in and taken out before, and on the hash seed of the process."""
    assert encoded({8, 0}) == encoded({0, 8}) and [*{8, 0}] != [*{0, 8}]


class Anything:
    pass


def test_what_is_not_plain_is_refused_with_its_place() -> None:
    with pytest.raises(CheckpointError, match=r"state\['a'\]\[1\] is of type .*Anything.*no pickles"):
        encoded({"a": [1, Anything()]})
    with pytest.raises(CheckpointError, match=r"numpy\.ndarray"):
        encoded(np.array([Anything()]))
    with pytest.raises(CheckpointError, match="MaskedArray"):  # Its mask would be lost.
        encoded(np.ma.masked_array([1, 2], [0, 1]))


@pytest.mark.parametrize("make", [lambda torch: torch.ones(2).bfloat16(), lambda torch: torch.eye(2).to_sparse()])
def test_tensors_that_numpy_cannot_hold_are_refused(make: Any) -> None:
    with pytest.raises(CheckpointError, match=r"state\['a'\] is of type torch\.Tensor"):
        encoded({"a": make(pytest.importorskip("torch"))})


@pytest.mark.parametrize(
    "text",
    [
        "{",
        json.dumps({"__kind__": "pickled", "base64": pickle.dumps(Anything).hex()}),
        json.dumps({"__kind__": "array", "dtype": "O", "shape": [1], "base64": "AAAAAAAAAAA="}),
        json.dumps({"__kind__": "array", "dtype": "<i8", "shape": [3], "base64": "AAAA"}),
        json.dumps({"__kind__": "tuple"}),
    ],
)
def test_what_was_not_written_here_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        decoded(text)
