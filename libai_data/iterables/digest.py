"""A running digest of rows. It shows whether ranks read different rows, and whether a stream replays."""

from __future__ import annotations

import hashlib
from collections import abc
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from libai_data.data.items import ArgumentNames, array_in, as_leaf, fields_in
from libai_data.data.nesting import TEXT, is_numbers
from libai_data.data.random.hashing import mix64_array
from libai_data.errors import SchemaError
from libai_data.iterables.collation import BatchRow
from libai_data.mesh.arrays import is_flow_tensor

_HASHED_BYTES = 1024  # arrays up to this size are hashed as they are; of a larger one, 64 bits for each block
_BLOCK_WORDS = 8192
_DEPTH = 3  # levels of nested objects that count; a limit, because objects may refer to each other in a circle


def running_digest(before: str, piece: Any, names: Sequence[str] | None = None) -> str:
    """The digest of a row and of all rows before it, whose digest is `before`. Every byte of the row counts.

    Of named fields, `names` count; with None, all except the notes of tools, whose names begin with "__".
    """
    digest = hashlib.blake2b(before.encode(), digest_size=8)
    if isinstance(piece, BatchRow):
        piece = {path: array_in(value)[piece.row] for path, value in piece.leaves.items()}
    fields = fields_in(piece)
    if fields is not None:
        names = () if names is None or isinstance(names, ArgumentNames) else names
        used = [name for name in names if name in fields]
        used = used or [name for name in fields if not str(name).startswith("__")]
        piece = {name: fields[name] for name in used}
    _feed(digest, piece, _DEPTH)
    return digest.hexdigest()


def _feed(digest: Any, value: Any, depth: int) -> None:
    # The most common types come first, because this function runs for each row.
    if type(value) is np.ndarray:
        _feed_array(digest, value, depth)
    elif value is None or isinstance(value, (bool, int, float)):
        digest.update(repr(value).encode())
    elif isinstance(value, TEXT):
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        _feed_bytes(digest, np.frombuffer(data, np.uint8), type(value).__name__)
    elif (fields := fields_in(value)) is not None:
        for name, item in fields.items():
            digest.update(f"{name}:".encode())
            _feed(digest, item, depth)
    elif isinstance(value, abc.Sequence) and not is_numbers(value):
        digest.update(f"[{len(value)}]".encode())
        for item in value:
            _feed(digest, item, depth)
    else:
        _feed_array(digest, value, depth)


def _feed_array(digest: Any, value: Any, depth: int) -> None:
    try:
        is_own = isinstance(value, (np.ndarray, np.generic))
        if is_flow_tensor(value) and value.is_global:
            value = value.to_local()  # Reading the whole tensor would be a collective.
        array = np.asarray(value if is_own else array_in(as_leaf(value, "")))
    except SchemaError:
        # Only the user's collator understands this value.
        digest.update(type(value).__qualname__.encode())
        if isinstance(value, list):
            _feed(digest, tuple(value), depth)
        elif depth and hasattr(value, "__dict__"):
            _feed(digest, {name: item for name, item in vars(value).items() if not callable(item)}, depth - 1)
        return
    if array.dtype.hasobject:
        _feed(digest, [str(array.dtype), *array.ravel().tolist()], depth)
    else:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        _feed_bytes(digest, data, f"{array.dtype.str}{array.shape}")


def _feed_bytes(digest: Any, data: np.ndarray, kind: str) -> None:
    digest.update(f"{kind} {data.size};".encode())
    if data.size > _HASHED_BYTES:
        # A sum with random weights changes with each byte, and is ten times as fast as a hash.
        words, weights = data[: data.size // 8 * 8].view(np.uint64), _weights()
        for start in range(0, len(words), _BLOCK_WORDS):
            block = words[start : start + _BLOCK_WORDS]
            digest.update(np.dot(block, weights[: len(block)]).tobytes())
        data = data[data.size // 8 * 8 :]
    digest.update(data)


@lru_cache(maxsize=1)
def _weights() -> np.ndarray:
    """Odd numbers of splitmix64, uint64 [_BLOCK_WORDS], the same on each machine."""
    return mix64_array(np.arange(1, _BLOCK_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)
