"""Named tensors in a file, in the safetensors format, written one by one and read slice by slice.

https://github.com/huggingface/safetensors#format: 8 bytes length of the header, the header in JSON, the tensors' bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from libai_data.engine.checkpoint.directory import CheckedFile
from libai_data.errors import CheckpointError

_DTYPES = {
    "BOOL": np.dtype("bool"),
    "I8": np.dtype("int8"),
    "U8": np.dtype("uint8"),
    "F16": np.dtype("float16"),
    "I32": np.dtype("int32"),
    "F32": np.dtype("float32"),
    "I64": np.dtype("int64"),
    "F64": np.dtype("float64"),
}
# numpy has no bfloat16; OneFlow converts such a tensor to a float32 array, without loss.
_CODES = {"bfloat16": "F32", **{dtype.name: code for code, dtype in _DTYPES.items()}}


def tensor_header(tensors: Mapping[str, Any]) -> tuple[bytes, list[str]]:
    """The header of a file of these tensors, and the order in which their bytes must follow.

    They are OneFlow tensors or numpy arrays. Raises CheckpointError if a file cannot store a tensor's dtype.
    """
    codes = {name: _code(name, tensor) for name, tensor in tensors.items()}
    # Wide dtypes come first, so that each tensor is aligned to the size of its items.
    order = sorted(tensors, key=lambda name: (-_DTYPES[codes[name]].itemsize, name))
    header: dict[str, Any] = {}
    offset = 0
    for name in order:
        shape = [int(size) for size in tensors[name].shape]
        end = offset + int(np.prod(shape, dtype=np.int64)) * _DTYPES[codes[name]].itemsize
        header[name] = {"dtype": codes[name], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, order


def write_tensor(file: CheckedFile, array: np.ndarray) -> None:
    """Append one tensor's bytes."""
    contiguous = np.ascontiguousarray(array)
    if contiguous.size:
        file.write(contiguous.reshape(-1).view(np.uint8).data)


def _code(name: str, tensor: Any) -> str:
    dtype = str(tensor.dtype).split(".")[-1]
    if dtype not in _CODES:
        raise CheckpointError(
            f"tensor '{name}' has dtype {dtype}, which a checkpoint cannot store; it can store {sorted(_CODES)}"
        )
    return _CODES[dtype]


class TensorFile:
    """Tensors of a file; only the requested tensors and parts are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = safe_open(str(path), framework="numpy")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error

    def names(self) -> list[str]:
        return list(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def read(self, name: str, part: Sequence[slice] | None = None) -> np.ndarray:
        """A new array of a tensor, or of the part with these slices, one for each dim."""
        if not part or 0 in self.shape(name):
            return self._file.get_tensor(name)
        return self._file.get_slice(name)[tuple(part)]
