"""Chunks of Riegeli files, of which ArrayRecord files are made, read through a memory map.

Sources: github.com/google/riegeli, `doc/riegeli_records_file_format.md`; github.com/google/array_record, `layout.cc`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from libai_data.sources.expanding import BrokenChunk, expander
from libai_data.sources.mapped_file import MappedFile

BLOCK = 1 << 16
BLOCK_HEADER = 24
FILE_START = bytes.fromhex("83af70d10d884a3f00000000000000004000000000000000")
SIMPLE = ord("r")
_HEADER_SIZE = 40


class Chunks(NamedTuple):
    """Chunks as they lie in a file.

    Args:
        data_hashes: HighwayHash of each one's `data`, as its header says; uint64 [n].
        num_records: int64 [n].
        decoded_sizes: bytes of all records, int64 [n].
        data: the records, encoded.
    """

    data_hashes: np.ndarray
    num_records: np.ndarray
    decoded_sizes: np.ndarray
    data: list[bytes]


def read_chunks(file: MappedFile, offsets: np.ndarray) -> Chunks:
    """The chunks at some offsets.

    Args:
        file: that holds them.
        offsets: where they begin, int64 [n].

    Raises:
        BrokenChunk: There is none, or it is not one of records; its `place` tells which.
    """
    in_block = offsets % BLOCK
    whole = (in_block >= BLOCK_HEADER) & (in_block <= BLOCK - _HEADER_SIZE) & (offsets <= file.size - _HEADER_SIZE)
    headers = np.empty((len(offsets), _HEADER_SIZE), np.uint8)
    headers[whole] = file.array[offsets[whole, None] + np.arange(_HEADER_SIZE)]
    starts = offsets + _HEADER_SIZE
    for place in np.flatnonzero(~whole).tolist():
        header, starts[place] = _read_across(file, int(offsets[place]), _HEADER_SIZE, place)
        headers[place] = np.frombuffer(header, np.uint8)
    fields = headers.view("<u8")
    kinds = fields[:, 3] & np.uint64(0xFF)
    if (kinds != SIMPLE).any():
        place = int(np.flatnonzero(kinds != SIMPLE)[0])
        raise BrokenChunk(f"it is of kind {chr(int(kinds[place]))!r}, where records are of kind 'r'", place)
    in_block = starts % BLOCK
    ends = starts + np.minimum(fields[:, 1], np.uint64(file.size + 1)).astype(np.int64)
    whole = (in_block > 0) & (ends - starts + in_block <= BLOCK) & (ends <= file.size)
    content = file.bytes
    data = [content[start:end] for start, end in zip(starts.tolist(), ends.tolist())]
    for place in np.flatnonzero(~whole).tolist():
        data[place], _ = _read_across(file, int(starts[place]), int(fields[place, 1]), place)
    return Chunks(fields[:, 2], (fields[:, 3] >> np.uint64(8)).astype(np.int64), fields[:, 4].astype(np.int64), data)


def _read_across(file: MappedFile, start: int, count: int, number: int) -> tuple[bytes, int]:
    """Bytes that go on behind the headers of blocks, and the place behind them."""
    if count > file.size:
        raise BrokenChunk(f"it says that it has {count} bytes, where the file has {file.size}", number)
    found: list[bytes] = []
    place = start
    while count:
        if place % BLOCK == 0:
            place += BLOCK_HEADER
        piece = file.bytes[place : min(place + count, place - place % BLOCK + BLOCK)]
        if not piece:
            raise BrokenChunk(f"the file ends at {file.size}, within it", number)
        found.append(piece)
        place += len(piece)
        count -= len(piece)
    return b"".join(found), place


def records_of(data: bytes, num_records: int, decoded_size: int) -> list[bytes]:
    """The records of a chunk.

    Args:
        data: of the chunk.
        num_records: as its header says.
        decoded_size: bytes of all records, as its header says.

    Raises:
        BrokenChunk: They do not fit the header, or what is compressed is broken.
        ConfigError: What decompresses them is not installed.
    """
    if num_records == 1 and len(data) > 1 and not data[0] and 2 + data[1] + decoded_size == len(data):
        return [data[2 + data[1] :]]  # As below, for the most frequent kind.
    if not data:
        raise BrokenChunk("it is empty")
    expand = expander(data[0])
    length, sizes_start = read_varint(data, 1)
    sizes_end = sizes_start + length
    values_size, values_start = _expanded_size(data, sizes_end, expand)
    if values_size != decoded_size:
        raise BrokenChunk(f"it holds {values_size} bytes of records, where its header says {decoded_size}")
    values = data[values_start:] if expand is None else expand(data[values_start:], values_size)
    if len(values) != values_size:
        raise BrokenChunk(f"it holds {len(values)} bytes of records, where {values_size} are announced")
    if num_records == 1:
        return [values]
    sizes_size, place = _expanded_size(data[:sizes_end], sizes_start, expand)
    packed = data[place:sizes_end] if expand is None else expand(data[place:sizes_end], sizes_size)
    return _cut(values, packed, num_records)


def _cut(values: bytes, packed: bytes, count: int) -> list[bytes]:
    if count > len(packed):
        raise BrokenChunk(f"it says that it has {count} records, and tells the sizes of {len(packed)} at most")
    records, start, place = [], 0, 0
    for _ in range(count):
        size, place = read_varint(packed, place)
        records.append(values[start : start + size])
        start += size
    if start != len(values) or place != len(packed):
        raise BrokenChunk(f"its {count} records have {start} bytes in all, where {len(values)} are there")
    return records


def _expanded_size(data: bytes, place: int, expand: Any) -> tuple[int, int]:
    """Bytes of a stretch when it is decompressed, and where it begins."""
    return (len(data) - place, place) if expand is None else read_varint(data, place)


def read_varint(data: bytes, place: int) -> tuple[int, int]:
    """A number of seven bits a byte, and the place behind it.

    Raises:
        BrokenChunk: The bytes end within it, or it is too long.
    """
    number = shift = 0
    while shift < 64:
        if place >= len(data):
            raise BrokenChunk("it ends within a number")
        byte = data[place]
        place += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, place
        shift += 7
    raise BrokenChunk("it holds a number of more than 64 bits")
