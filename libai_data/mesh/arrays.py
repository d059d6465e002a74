"""Convert the values of fields to numpy arrays and OneFlow tensors, without a copy where possible."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from math import inf
from typing import Any

import numpy as np

from libai_data.errors import SchemaError

_TOO_LARGE = 2**63
_LARGEST = float(np.finfo(np.float32).max)


def is_flow_tensor(value: Any) -> bool:
    """Whether `value` is a OneFlow tensor, without importing OneFlow to find out."""
    # If another thread is importing OneFlow, its module has no Tensor yet, so no value can be a OneFlow tensor.
    return isinstance(value, getattr(sys.modules.get("oneflow"), "Tensor", ()))


def as_array(value: Any, field_name: str = "") -> np.ndarray:
    """Turn a field's value into a numpy array, copying only what is not an array yet.

    Args:
        value: numpy array or scalar, OneFlow or array-like tensor, bool, int, float, or a (nested) list of numbers. As
            in OneFlow, Python ints become int64 and Python floats float32.

    Returns:
        The array, in native byte order. A numpy array in native byte order is returned without a copy.

    Raises:
        SchemaError: The value is ragged, masked or not numeric, or a number of it fits neither int64 nor float32.
    """
    subject = f"field '{field_name}'" if field_name else "the value"
    if isinstance(value, np.ndarray):
        # np.matrix always has two dims, so it cannot be stacked.
        array = np.asarray(value) if isinstance(value, np.matrix) else value
    elif type(value) is float:
        if _LARGEST < abs(value) < inf:
            raise _beyond_float32(value, subject)
        return np.asarray(value, dtype=np.float32)
    elif isinstance(value, (list, tuple)):
        array = _array_of_list(value, subject)
    elif hasattr(value, "numpy") and callable(value.numpy):
        try:
            if hasattr(value, "detach"):  # A tensor may have a gradient, or be on a device.
                value = value.detach().cpu()
            array = np.asarray(value.numpy())
        except (TypeError, RuntimeError) as error:
            raise SchemaError(
                f"{subject} ({type(value).__name__}) cannot become an array: {error}; return a dense tensor of a dtype "
                "that numpy has, such as value.float()"
            ) from error
    else:
        array = np.asarray(value)
    if type(array) is not np.ndarray and np.ma.is_masked(array):
        raise SchemaError(f"{subject} is a masked array, but a tensor has no mask; return value.filled(...)")
    if array.dtype.kind not in "biufc":
        if _holds_large_ints(value):
            raise SchemaError(f"{subject} holds integers beyond int64; return smaller ones, or texts")
        raise SchemaError(
            f"{subject} holds {type(value).__name__} (dtype {array.dtype}), which cannot become a tensor; return "
            f"{as_dict(value) or 'numbers, lists of numbers, numpy arrays, OneFlow tensors, or a dict of these'}"
        )
    return _native(array)


def check_fits(name: str, value: Any, row: Any, whose: str = "") -> None:
    """Refuse a value that numpy would round, or repeat, to write it into a row of a batch.

    Args:
        name: of the field.
        value: numpy array or scalar.
        row: the row, a numpy array or scalar.
        whose: words for the message, behind the name of the field.

    Raises:
        SchemaError: The shapes differ, or the row's dtype cannot hold all values of the other dtype.
    """
    if value.shape != row.shape or not np.can_cast(value.dtype, row.dtype):
        raise SchemaError(
            f"field '{name}'{whose} is {value.dtype} {list(value.shape)}, in the samples before it {row.dtype} "
            f"{list(row.shape)}; give all samples the same shape and dtype"
        )


def as_dict(value: Any) -> str:
    """Python code that turns an attrs or pydantic object, or a pandas row, into a dict; "" for other values."""
    if callable(getattr(value, "to_dict", None)):
        return "item.to_dict()"
    if hasattr(value, "__attrs_attrs__"):
        return "attrs.asdict(item, recurse=False)"
    return "dict(item)" if hasattr(type(value), "model_fields") or hasattr(type(value), "__fields__") else ""


def _native(array: np.ndarray) -> np.ndarray:
    """The array in native byte order, the only one that OneFlow supports."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _array_of_list(values: Sequence[Any], subject: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise SchemaError(
            f"{subject} is a ragged list: {error}; pad it, or use a padding collator, such as PadCollator"
        ) from error
    if array.dtype == object and not _holds_large_ints(values):
        raise SchemaError(f"{subject} is a list of unequal or non-numeric items; pad it, or convert its items")
    if array.dtype != np.float64 or type(first_leaf(values)) not in (bool, int, float):
        return array
    sizes = np.abs(array)
    # If no integer dtype fits all ints of the list, numpy converts them to floats.
    if (sizes >= _TOO_LARGE).any() and _holds_large_ints(values):
        raise SchemaError(f"{subject} is a list with integers beyond int64, which would become inexact floats")
    beyond = array[(sizes > _LARGEST) & (sizes < inf)]
    if beyond.size:
        raise _beyond_float32(beyond[0], subject)
    return array.astype(np.float32)


def _beyond_float32(value: float, subject: str) -> SchemaError:
    return SchemaError(
        f"{subject} holds {value}, but Python floats become float32, which ends at 3.4e38; return values of np.float64"
    )


def _holds_large_ints(values: Any) -> bool:
    if isinstance(values, (list, tuple)):
        return any(map(_holds_large_ints, values))
    return type(values) is int and abs(values) >= _TOO_LARGE


def first_leaf(values: Any) -> Any:
    """The first item of nested lists that is no list itself; 0.0 for an empty list, which is float in numpy."""
    while isinstance(values, (list, tuple)):
        values = values[0] if values else 0.0
    return values


def as_flow_tensor(tensor: Any, subject: str = "") -> Any:
    """Make a OneFlow tensor over an array's memory, or of a copy if it is not contiguous; return a tensor as it is.

    Args:
        subject: what the array is, as the first words of an error's message.

    Raises:
        SchemaError: The array is masked, or OneFlow lacks its dtype.
    """
    if type(tensor) is not np.ndarray:
        if not isinstance(tensor, np.ndarray):
            return tensor
        if np.ma.is_masked(tensor):
            raise SchemaError("a masked array cannot become a tensor, which has no mask; pass value.filled(...)")
    try:
        return _from_numpy()(tensor if tensor.flags.c_contiguous else tensor.copy())
    except RuntimeError as error:
        if not tensor.dtype.isnative:
            return as_flow_tensor(_native(tensor), subject)
        # A dim of size 1 may have a negative stride, which OneFlow refuses.
        if min(tensor.strides, default=0) < 0:
            return as_flow_tensor(np.ascontiguousarray(tensor).copy(), subject)
        raise SchemaError(
            f"{subject}OneFlow has no tensors of dtype {tensor.dtype}; convert the field to bool, int8, uint8, int32, "
            "int64, float16, float32 or float64"
        ) from error


def as_flow_tensors(arrays: Mapping[str, np.ndarray]) -> list[Any]:
    """`as_flow_tensor` for the fields of a batch, which are contiguous. Errors name the field."""
    try:
        return [*map(_from_numpy(), arrays.values())]
    except RuntimeError:
        return [as_flow_tensor(array, f"field '{name}': ") for name, array in arrays.items()]


@cache
def _from_numpy() -> Any:
    import oneflow as flow

    return flow.from_numpy


def stack_tensors(tensors: Sequence[Any]) -> Any:
    """Stack arrays of one shape and dtype along a new dim 0; if one is a OneFlow tensor, the result is, too.

    Raises:
        SchemaError: The shapes or dtypes differ.
    """
    # Comparing types is faster, and enough if all are numpy arrays, as usual.
    are_flow = {*map(type, tensors)} != {np.ndarray} and any(map(is_flow_tensor, tensors))
    if are_flow:
        tensors = [as_flow_tensor(tensor) for tensor in tensors]
    shape, dtype = tensors[0].shape, tensors[0].dtype
    for row, tensor in enumerate(tensors):
        if tensor.shape != shape:
            raise SchemaError(
                f"shapes differ between samples of a batch: sample 0 has {list(shape)}, sample {row} has "
                f"{list(tensor.shape)}; pad them, or use a padding collator, such as PadCollator"
            )
        if tensor.dtype != dtype:
            raise SchemaError(
                f"dtypes differ between samples of a batch: sample 0 has {dtype}, sample {row} has {tensor.dtype}"
            )
    if are_flow:
        import oneflow as flow

        return flow.stack(tensors, dim=0)
    return np.stack(tensors)


def check_padding(name: str, dtype: np.dtype, value: Any) -> None:
    """Raise a SchemaError if the dtype of a field cannot hold the value that the field is padded with."""
    if not _can_represent(dtype, value):
        raise SchemaError(
            f"field '{name}' is padded with {value!r}, which its dtype {dtype} cannot hold; use another value, or "
            "convert the field in the dataset"
        )


@lru_cache(maxsize=64)
def _can_represent(dtype: np.dtype, value: Any) -> bool:
    """Whether a dtype has the value, up to rounding of floats: numpy silently converts -1 to 255, and 0.5 to 0."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            held = np.array(value).astype(dtype)
        except (ValueError, OverflowError):
            return False
    if dtype.kind in "fc":
        return bool(np.isfinite(held)) == (abs(value) < inf)
    return bool(held == value)
