"""A running digest of rows: ranks that read other rows, and a stream that does not replay, are noticed by it."""

from __future__ import annotations

import hashlib
from collections import abc
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from libai_data.data.items import ArgumentNames, array_in, as_leaf, fields_in
from libai_data.data.nesting import TEXT, is_numbers
from libai_data.errors import SchemaError
from libai_data.iterables.collation import BatchRow
from libai_data.mesh.arrays import is_flow_tensor

_HASHED_BYTES = 1024  # up to so many bytes of an array are hashed as they are; of a larger one, 64 bits for each block
_BLOCK_WORDS = 8192
_DEPTH = 3  # objects are looked into no deeper, since they may refer to each other in a circle


def running_digest(before: str, piece: Any, names: Sequence[str] | None = None) -> str:
    """A digest of a row and, by theirs, of all rows before it. Every byte of the row counts.

    Args:
        before: the digest of the rows before; "" for none.
        piece: a sample of any form, or a `BatchRow`.
        names: fields that are used; others of a piece that has names do not count. None for all but tools' notes,
            which begin with "__".
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
    # The commonest first: this is done for each row.
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
            value = value.to_local()  # All of it could be had only together with the other ranks.
        array = np.asarray(value if is_own else array_in(as_leaf(value, "")))
    except SchemaError:
        # What only the user's collator understands.
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
        # A sum with random weights is noticed by a change of any byte, and ten times as fast as a hash.
        words, weights = data[: data.size // 8 * 8].view(np.uint64), _weights()
        for start in range(0, len(words), _BLOCK_WORDS):
            block = words[start : start + _BLOCK_WORDS]
            digest.update(np.dot(block, weights[: len(block)]).tobytes())
        data = data[data.size // 8 * 8 :]
    digest.update(data)


@lru_cache(maxsize=1)
def _weights() -> np.ndarray:
    """The same odd numbers on each machine, uint64 [_BLOCK_WORDS], as splitmix64 makes them."""
    mixed = np.arange(1, _BLOCK_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
