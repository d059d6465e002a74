"""A record of several fields in bytes, a file of the safetensors format: how ArrayRecord shards hold such records.

Format: github.com/huggingface/safetensors, "Format". Arrays are its tensors. Bytes are tensors of uint8, whose names
stand under "bytes" in its metadata; all other values stand there under "values", as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from libai_data.errors import FormatError, SchemaError

_DTYPES = {
    "BOOL": "bool",
    "U8": "<u1",
    "I8": "<i1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
_LENGTH = 8


def pack_record(record: Mapping[str, Any]) -> bytes:
    """The bytes of a record.

    Args:
        record: field -> bytes, an array of numbers, or what JSON takes.

    Raises:
        SchemaError: A value is none of these; the field is named.
    """
    header: dict[str, Any] = {}
    values: dict[str, Any] = {}
    of_bytes: list[str] = []
    data = b""
    for name, value in record.items():
        if isinstance(value, bytes):
            of_bytes.append(name)
            value = np.frombuffer(value, np.uint8)
        if isinstance(value, (np.ndarray, np.generic)):
            array = np.asarray(value)
            if array.dtype.newbyteorder("=") not in _NAMES or name == _METADATA:
                raise SchemaError(f"field {name!r} is an array of {array.dtype}, which cannot be packed; use numbers")
            content = array.astype(array.dtype.newbyteorder("<")).tobytes()
            header[name] = {
                "dtype": _NAMES[array.dtype.newbyteorder("=")],
                "shape": list(array.shape),
                "data_offsets": [len(data), len(data) + len(content)],
            }
            data += content
        else:
            values[name] = value
    try:
        notes = {"bytes": json.dumps(of_bytes), "values": json.dumps(values)}
    except (TypeError, ValueError) as error:
        raise SchemaError(f"one of the fields {list(values)} holds what JSON does not take: {error}") from error
    head = json.dumps({_METADATA: notes, **header}).encode()
    head += b" " * (-len(head) % _LENGTH)
    return len(head).to_bytes(_LENGTH, "little") + head + data


def unpack_record(packed: bytes) -> dict[str, Any]:
    """The record that `pack_record` packed; arrays are read-only views of the bytes.

    Raises:
        FormatError: The bytes are no such record.
    """
    try:
        start = _LENGTH + int.from_bytes(packed[:_LENGTH], "little")
        header = json.loads(packed[_LENGTH:start])
        notes = header.pop(_METADATA)
        of_bytes, record = set(json.loads(notes["bytes"])), json.loads(notes["values"])
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            content = packed[start + first : start + last]
            dtype = np.dtype(_DTYPES[entry["dtype"]])
            record[name] = content if name in of_bytes else np.frombuffer(content, dtype).reshape(entry["shape"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{len(packed)} bytes are no packed record: {error!r}") from error
    return dict(record)
