"""The index of `.bin/.idx` files: the memory-mapped format of LiBai and Megatron-LM.

`<prefix>.bin` contains the tokens of all sequences, one after the other. `<prefix>.idx` contains, little-endian:

| offset | what |
|---|---|
| 0 | 9 bytes, `MMIDIDX` and two zeros |
| 9 | uint64, version: 1 |
| 17 | uint8, code of the tokens' dtype |
| 18 | uint64, n: number of sequences |
| 26 | uint64, m: length of the document index |
| 34 | int32 [n], tokens of each sequence |
| 34 + 4n | int64 [n], the byte of `.bin` at which each sequence begins |
| 34 + 12n | int64 [m], the first sequence of each document, and n at the end |

Format: `MMapIndexedDataset` of LiBai 0.1.1, `libai/data/data_utils/indexed_dataset.py`.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from libai_data.errors import ConfigError, FormatError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
"""Codes of the dtypes that tokens may have."""

LARGEST_SEQUENCE = 2**31 - 1
"""Most tokens of a sequence: the file stores this number as int32."""

_FLOAT_CODES = (6, 7)
_HEADER = struct.Struct("<9sQBQQ")
_SIZES, _POINTERS, _DOCUMENTS = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<i8")
_CHECKED_AT_ONCE = 1 << 20


class SequenceIndex(NamedTuple):
    """The content of an `.idx` file."""

    dtype: np.dtype  # of the tokens
    sizes: np.ndarray  # int32 [n], tokens of each sequence
    pointers: np.ndarray  # int64 [n], the byte of `.bin` at which each sequence begins
    documents: np.ndarray  # int64 [documents + 1], the first sequence of each document, and n at the end


def code_of(dtype: Any) -> int:
    """The code of a dtype; a ConfigError if the format does not have it."""
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError):
        found = dtype
    for code, known in DTYPES.items():
        if found == known:
            return code
    names = [np.dtype(known).name for known in DTYPES.values()]
    raise ConfigError(f"tokens of dtype {found!r} cannot be written as .bin/.idx; the format has {names}")


def parse_index(content: np.ndarray, bin_bytes: int, name: str) -> SequenceIndex:
    """Read an index without a copy, and check all of it. A FormatError if it is truncated, of another format, or does
    not fit the `.bin` file.

    Args:
        content: uint8, the bytes of the `.idx` file; the arrays of the result are views of these bytes.
        bin_bytes: size of the `.bin` file, in bytes.
        name: name of the `.idx` file, for messages.
    """
    if len(content) < _HEADER.size:
        raise FormatError(f"{name} has {len(content)} bytes, but the header of a .idx file alone has {_HEADER.size}")
    magic, version, code, count, document_entries = _HEADER.unpack(content[: _HEADER.size].tobytes())
    if magic != MAGIC:
        raise FormatError(f"{name} begins with {magic!r}, but a .idx file of this format has {MAGIC!r} at offset 0")
    if version != VERSION:
        raise FormatError(f"{name} has version {version} at offset 9; known is {VERSION}")
    if code not in DTYPES:
        what = "which stands for floats, not tokens" if code in _FLOAT_CODES else f"known are {sorted(DTYPES)}"
        raise FormatError(f"{name} has the dtype code {code} at offset 17; {what}")
    pointers_at = _HEADER.size + _SIZES.itemsize * count
    documents_at = pointers_at + _POINTERS.itemsize * count
    end = documents_at + _DOCUMENTS.itemsize * document_entries
    if end != len(content):
        raise FormatError(
            f"{name} has {len(content)} bytes, but according to its header ({count} sequences at offset 18, "
            f"{document_entries} document entries at offset 26) it has {end}; it is truncated, or not finished"
        )
    index = SequenceIndex(
        np.dtype(DTYPES[code]),
        content[_HEADER.size : pointers_at].view(_SIZES),
        content[pointers_at:documents_at].view(_POINTERS),
        content[documents_at:end].view(_DOCUMENTS),
    )
    _check_sequences(index, bin_bytes, name)
    _check_documents(index.documents, count, documents_at, name)
    return index


def index_header(dtype: Any, sequences: int, document_entries: int) -> bytes:
    """The first 34 bytes of an `.idx` file."""
    return _HEADER.pack(MAGIC, VERSION, code_of(dtype), sequences, document_entries)


def _check_sequences(index: SequenceIndex, bin_bytes: int, name: str) -> None:
    """Check that each sequence begins where the previous one ends; in parts that fit into the processor's cache."""
    count, itemsize, expected = len(index.sizes), index.dtype.itemsize, 0
    for first in range(0, count, _CHECKED_AT_ONCE):
        sizes = index.sizes[first : first + _CHECKED_AT_ONCE].astype(np.int64)
        pointers = index.pointers[first : first + _CHECKED_AT_ONCE]
        # No overflow: at most the size of the file plus 2**20 sequences of 2**31 tokens of 8 bytes.
        ends = np.cumsum(sizes * itemsize) + expected
        starts = ends - sizes * itemsize
        wrong = (sizes < 0) | (starts != pointers) | (ends > bin_bytes)
        if wrong.any():
            place = int(np.argmax(wrong))
            offsets = [_HEADER.size + 4 * (first + place), _HEADER.size + 4 * count + 8 * (first + place)]
            raise FormatError(
                f"{name} says at the offsets {offsets} that sequence {first + place} of {count} has {sizes[place]} "
                f"{index.dtype} tokens and begins at byte {pointers[place]} of the .bin file; but the sequences before "
                f"it end at byte {starts[place]}, and the .bin file has {bin_bytes} bytes; one of the two files is "
                "truncated, or belongs to another file"
            )
        expected = int(ends[-1])
    if expected != bin_bytes:
        raise FormatError(
            f"the .bin file has {bin_bytes} bytes, but according to {name}, its {count} sequences have {expected} "
            f"({index.dtype} tokens); it was not finished, or belongs to another .idx file"
        )


def _check_documents(documents: np.ndarray, count: int, offset: int, name: str) -> None:
    """Check that the entries begin with sequence 0, never decrease, and end with the number of sequences."""
    wrong = np.zeros(max(len(documents), 1), bool)
    wrong[1:] = documents[1:] < documents[:-1]
    wrong[0] |= not len(documents) or documents[0] != 0
    wrong[-1] |= not len(documents) or documents[-1] != count
    if wrong.any():
        place = int(np.argmax(wrong))
        found = documents[max(place - 1, 0) : place + 1].tolist()
        raise FormatError(
            f"{name} has {len(documents)} document entries (offset 26), which must be the first sequence of each "
            f"document, from 0 on, and at the end the number of sequences, {count}; entry {place} at offset "
            f"{offset + 8 * place} is wrong, here after the entry before it: {found}"
        )
