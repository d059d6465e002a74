"""Where the chunks of an ArrayRecord file lie, as the file's end tells.

The last block of 64 KiB is the postscript, which says where the footer is; the footer lists the chunks.
Source: github.com/google/array_record, `layout.proto` and `array_record_reader.cc`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from libai_data.sources.expanding import BrokenChunk
from libai_data.sources.highway_hash import hashes
from libai_data.sources.mapped_file import MappedFile
from libai_data.sources.riegeli import BLOCK, BLOCK_HEADER, FILE_START, read_chunks, read_varint, records_of

_MAGIC = 0x71930E704FDAE05E
_OFFSET, _DECODED_SIZE, _NUM_RECORDS = 0x08, 0x10, 0x18  # Tags of varints: fields 1, 2 and 3.
_FOOTER_METADATA = 0x0A
_LONGEST_VARINT = 10
# A long list of chunks would take seconds; damage of it shows in what it lists.
_HASHED_AT_MOST = 1 << 12


class ChunkIndex(NamedTuple):
    """The chunks of a file, in its order.

    Args:
        offsets: of each, int64 [chunks].
        decoded_sizes: bytes of its records, int64 [chunks].
        ends: how many records there are up to its end, int64 [chunks]; None if each holds one.
    """

    offsets: np.ndarray
    decoded_sizes: np.ndarray
    ends: np.ndarray | None

    @property
    def num_records(self) -> int:
        """In all chunks."""
        return len(self.offsets) if self.ends is None else int(self.ends[-1])

    def rows_before(self, numbers: np.ndarray) -> np.ndarray:
        """How many records there are before some chunks, int64 [n]."""
        if self.ends is None:
            return numbers
        return np.where(numbers > 0, self.ends[np.maximum(numbers, 1) - 1], 0)

    def records_in(self, numbers: np.ndarray) -> np.ndarray:
        """How many records some chunks hold, int64 [n]."""
        return np.ones_like(numbers) if self.ends is None else self.ends[numbers] - self.rows_before(numbers)


def read_index(file: MappedFile) -> ChunkIndex:
    """The chunks of a file.

    Args:
        file: the file.

    Raises:
        BrokenChunk: It is no ArrayRecord file, or is cut short; the message says why, and where.
    """
    if file.size < 2 * BLOCK or file.size % BLOCK or file.bytes[:BLOCK_HEADER] != FILE_START:
        raise BrokenChunk(
            f"it has {file.size} bytes, and is no whole ArrayRecord file: such a file begins as Riegeli files do, and "
            f"has a multiple of {BLOCK} bytes"
        )
    footer_offset = _footer_offset(file)
    try:
        records = _records_at(file, footer_offset)
        metadata, entries = records[0], records[1:]
        told = _metadata(metadata)
        index = _parsed(entries, footer_offset)
    except (BrokenChunk, IndexError) as error:
        raise BrokenChunk(f"offset {footer_offset}: the footer cannot be read: {error}") from error
    if told != (len(index.offsets), index.num_records if len(index.offsets) else 0):
        raise BrokenChunk(
            f"offset {footer_offset}: the footer announces {told[0]} chunks with {told[1]} records, and lists "
            f"{len(index.offsets)} with {index.num_records}"
        )
    return index


def _footer_offset(file: MappedFile) -> int:
    offset = file.size - BLOCK
    try:
        postscript = _records_at(file, offset)[0]
        fields = _varint_fields(postscript)
    except (BrokenChunk, IndexError) as error:
        raise BrokenChunk(f"offset {offset}: the file has no postscript, as if it were cut short: {error}") from error
    footer = fields.get(_OFFSET, 0)
    if fields.get(_DECODED_SIZE) != _MAGIC or not BLOCK_HEADER <= footer < offset:
        raise BrokenChunk(f"offset {offset}: the postscript is not that of an ArrayRecord file of {file.size} bytes")
    return footer


def _records_at(file: MappedFile, offset: int) -> list[bytes]:
    chunks = read_chunks(file, np.array([offset]))
    if len(chunks.data[0]) <= _HASHED_AT_MOST and hashes(chunks.data)[0] != chunks.data_hashes[0]:
        raise BrokenChunk("its checksum does not fit its bytes")
    return records_of(chunks.data[0], int(chunks.num_records[0]), int(chunks.decoded_sizes[0]))


def _varint_fields(message: bytes) -> dict[int, Any]:
    fields: dict[int, Any] = {}
    place = 0
    while place < len(message):
        tag, place = read_varint(message, place)
        if tag & 7 == 2:
            length, place = read_varint(message, place)
            fields[tag] = message[place : place + length]
            place += length
        else:
            fields[tag], place = read_varint(message, place)
    return fields


def _metadata(message: bytes) -> tuple[int, int]:
    """How many chunks and records there are."""
    inner = _varint_fields(_varint_fields(message).get(_FOOTER_METADATA, b""))
    return inner.get(_DECODED_SIZE, 0), inner.get(_NUM_RECORDS, 0)


def _parsed(entries: list[bytes], footer_offset: int) -> ChunkIndex:
    """The entries of the footer, a few numbers each, all at once."""
    data = np.frombuffer(b"".join(entries), np.uint8)
    last = np.flatnonzero(data < 0x80)
    starts = np.concatenate([[0], last[:-1] + 1]) if len(last) else np.zeros(0, np.int64)
    lengths = last - starts + 1
    entry_ends = np.cumsum([len(entry) for entry in entries])
    # Of a message of varints alone, every second number is a field's tag.
    numbers_before = np.searchsorted(last, entry_ends, side="left")
    whole = not len(entries) or (len(last) and last[-1] == len(data) - 1 and lengths.max() < _LONGEST_VARINT)
    if not whole or (np.diff(numbers_before, prepend=0) % 2).any() or (np.diff(entry_ends, prepend=0) == 0).any():
        raise BrokenChunk("its list of chunks is no list of numbers")
    shifts = (np.arange(len(data)) - np.repeat(starts, lengths)) * 7
    numbers = np.add.reduceat((data & 0x7F).astype(np.int64) << shifts, starts) if len(data) else np.zeros(0, np.int64)
    tags, values = numbers[::2], numbers[1::2]
    owner = np.searchsorted(numbers_before, np.arange(0, len(numbers), 2), side="right")
    columns = []
    for tag in (_OFFSET, _DECODED_SIZE, _NUM_RECORDS):
        column, chosen = np.zeros(len(entries), np.int64), tags == tag  # A zero is left out of a message.
        column[owner[chosen]] = values[chosen]
        columns.append(column)
    offsets, decoded_sizes, num_records = columns
    if len(entries) and (offsets[0] < BLOCK_HEADER or offsets[-1] >= footer_offset or (np.diff(offsets) <= 0).any()):
        raise BrokenChunk("its list of chunks is not in the order of the file")
    if (num_records <= 0).any() or num_records.sum() >= 1 << 48:
        raise BrokenChunk("it lists chunks without records, or of more than can be")
    return ChunkIndex(offsets, decoded_sizes, None if (num_records == 1).all() else np.cumsum(num_records))
