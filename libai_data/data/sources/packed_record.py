"""A record of several fields as bytes in the safetensors format, for ArrayRecord shards.

Format: github.com/huggingface/safetensors, "Format". Arrays are tensors of the format. Bytes are uint8 tensors, whose
names are listed under "bytes" in the metadata. All other values are under "values" in the metadata, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from libai_data.errors import FormatError, SchemaError

_METADATA = "__metadata__"
_LENGTH = 8


def pack_record(record: Mapping[str, Any]) -> bytes:
    """The bytes of a record.

    Args:
        record: field -> bytes, an array of numbers, or a value that JSON can store.

    Raises:
        SchemaError: A value is none of these; the message names the field or fields.
    """
    arrays: dict[str, np.ndarray] = {}
    values: dict[str, Any] = {}
    for name, value in record.items():
        if not isinstance(name, str) or name == _METADATA:
            raise SchemaError(f"a field has the name {name!r}; a name is a text other than {_METADATA!r}")
        if isinstance(value, bytes):
            arrays[name] = np.frombuffer(value, np.uint8)
        elif isinstance(value, (np.ndarray, np.generic)):
            # safetensors writes the memory as it lies, so it would mix up the values of Fortran's order and of views.
            arrays[name] = np.asarray(value, order="C")
            if arrays[name].dtype.kind not in "biuf" or value.dtype.itemsize > 8:
                raise SchemaError(f"field {name!r} is an array of {value.dtype}, which cannot be packed; use numbers")
        else:
            values[name] = value
    of_bytes = [name for name, value in record.items() if isinstance(value, bytes)]
    try:
        notes = {"bytes": json.dumps(of_bytes), "values": json.dumps(values)}
    except (TypeError, ValueError) as error:
        raise SchemaError(f"one of the fields {list(values)} has a value that JSON cannot store: {error}") from error
    # A record must always give the same bytes, but safetensors does not fix the order of its metadata.
    header, data = _parts(save(arrays))
    head = json.dumps({_METADATA: notes, **header}).encode()
    head += b" " * (-len(head) % _LENGTH)
    return len(head).to_bytes(_LENGTH, "little") + head + data


def unpack_record(packed: bytes) -> dict[str, Any]:
    """The record that `pack_record` packed.

    Raises:
        FormatError: The bytes are no packed record.
    """
    try:
        arrays = load(packed)
        header, _ = _parts(packed)
        notes = header.pop(_METADATA)
        record: dict[str, Any] = dict(json.loads(notes["values"]))
        of_bytes = set(json.loads(notes["bytes"]))
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{len(packed)} bytes are no packed record: {error!r}") from error
    for name in header:
        record[name] = arrays[name].tobytes() if name in of_bytes else arrays[name]
    return record


def _parts(packed: bytes) -> tuple[dict[str, Any], bytes]:
    """The header, and the data after it."""
    stop = _LENGTH + int.from_bytes(packed[:_LENGTH], "little")
    return json.loads(packed[_LENGTH:stop]), packed[stop:]
