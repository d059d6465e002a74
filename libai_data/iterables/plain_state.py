"""States of other libraries' objects as JSON text. Loading the text makes plain values only.

A checkpoint may come from anywhere, and loading a pickle runs any code that its writer put there.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from libai_data.errors import CheckpointError, error_text
from libai_data.mesh.arrays import is_flow_tensor

_TAG = "__kind__"


def encoded(state: Any, with_tensors: bool = False) -> str:
    """A state as JSON text; a CheckpointError names a value of another type and its place.

    It may have numbers, strings, bytes, None, numpy arrays and scalars, torch tensors; lists, tuples, sets and dicts.

    Args:
        with_tensors: whether it may have tensors of OneFlow. If these are global, this function and `decoded` are
            collective.
    """
    return json.dumps(_packed(state, "state", with_tensors))


def decoded(text: str) -> Any:
    """The inverse of `encoded`."""
    with saved_in(text) as saved:
        return _unpacked(saved)


@contextmanager
def saved_in(text: str) -> Iterator[Any]:
    """Parse the JSON of a state of this package. If the block raises, the state is damaged: a CheckpointError."""
    try:
        yield json.loads(text)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"a saved state cannot be read: {error_text(error)} in {text:.200}") from error


def _packed(value: Any, where: str, with_tensors: bool) -> Any:
    def packed(item: Any, place: str = "") -> Any:
        return _packed(item, where + place, with_tensors)

    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [packed(item, f"[{place}]") for place, item in enumerate(value)]
    if type(value) is dict and all(type(key) is str for key in value) and _TAG not in value:
        return {key: packed(item, f"[{key!r}]") for key, item in value.items()}
    if isinstance(value, dict):
        items = [[packed(key), packed(item, f"[{key!r}]")] for key, item in value.items()]
        return {_TAG: "dict", "items": items}
    if isinstance(value, (tuple, set, frozenset)):
        items = list(map(packed, value))
        if isinstance(value, tuple):
            return {_TAG: "tuple", "items": items}
        return {_TAG: "set", "items": sorted(items, key=json.dumps)}  # as in every process, whatever its hash seed
    if isinstance(value, (bytes, bytearray)):
        return {_TAG: "bytes", "base64": _text_of(bytes(value))}
    is_array = isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, np.ma.MaskedArray)
    if is_array and value.dtype.kind in "biufc":
        return _packed_array(np.asarray(value), "array" if isinstance(value, np.ndarray) else "scalar")
    if type(value).__module__ == "torch" and type(value).__name__ == "Tensor":
        with suppress(TypeError):  # numpy has no sparse arrays, and not all dtypes.
            return _packed_array(value.detach().cpu().numpy(), "torch")
    if with_tensors and is_flow_tensor(value):
        with suppress(TypeError, ValueError):
            name = str(value.dtype).rpartition(".")[2]  # numpy lacks bfloat16
            return {**_packed_array(value.numpy(), "oneflow"), "of": name, "is_global": value.is_global}
    raise CheckpointError(
        f"{where} is of type {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot "
        "store, since it has no pickles. Return numbers, strings, bytes, arrays, and lists and dicts of these"
    )


def _packed_array(array: np.ndarray, kind: str) -> Any:
    return {_TAG: kind, "dtype": array.dtype.str, "shape": list(array.shape), "base64": _text_of(array.tobytes())}


def _text_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: _unpacked(item) for key, item in value.items()}
    if kind == "dict":
        return {_unpacked(key): _unpacked(item) for key, item in value["items"]}
    if kind in ("tuple", "set"):
        items = [_unpacked(item) for item in value["items"]]
        return tuple(items) if kind == "tuple" else set(items)
    content = base64.b64decode(value["base64"])
    if kind == "bytes":
        return content
    array = np.frombuffer(content, np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    if kind == "oneflow":
        import oneflow as flow

        tensor = flow.tensor(array, dtype=getattr(flow, value["of"]))
        return tensor.to_global(flow.placement.all("cpu"), flow.sbp.broadcast) if value["is_global"] else tensor
    if kind == "torch":
        import torch

        return torch.from_numpy(array)
    return array if kind == "array" else array[()]
