"""A digest of rows, by which a stream that does not replay the same way is noticed."""

from __future__ import annotations

import hashlib
from collections import abc
from typing import Any

import numpy as np

from libai_data.errors import SchemaError
from libai_data.integrations.collation import BatchRow
from libai_data.integrations.items import array_in, as_leaf, fields_in
from libai_data.nesting import TEXT


def running_digest(before: str, piece: Any) -> str:
    """A digest of a row and, by theirs, of all rows before it.

    Args:
        before: the digest of the rows before; "" for none.
        piece: a sample of any form, or a `BatchRow`.
    """
    digest = hashlib.blake2b(before.encode(), digest_size=12)
    if isinstance(piece, BatchRow):
        piece = {path: array_in(value)[piece.row] for path, value in piece.leaves.items()}
    _feed(digest, piece)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    fields = fields_in(value)
    if fields is not None:
        for name, item in fields.items():
            digest.update(f"{name}:".encode())
            _feed(digest, item)
    elif value is None or isinstance(value, (*TEXT, bool, int, float)):
        digest.update(repr(value).encode())
    elif isinstance(value, abc.Sequence):
        digest.update(f"[{len(value)}]".encode())
        for item in value:
            _feed(digest, item)
    else:
        try:
            array = np.ascontiguousarray(array_in(as_leaf(value, "")))
        except SchemaError:
            # What only the user's collator understands; its kind is all that can be told.
            digest.update(type(value).__qualname__.encode())
            return
        digest.update(f"{array.dtype} {list(array.shape)}".encode())
        digest.update(array.tobytes())
