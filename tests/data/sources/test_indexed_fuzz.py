"""Corrupted `.idx` files: an error, or just what the bytes say."""

from __future__ import annotations

import struct

import numpy as np

from libai_data.errors import FormatError
from libai_data.data.sources.indexed_format import DTYPES, parse_index

INPUTS = 12_000
Said = tuple[int, list[int], list[int], list[int]]


def whole(random: np.random.Generator) -> tuple[bytes, int]:
    """A good index of up to 8 sequences, and the size of its `.bin` file."""
    code = int(random.choice(list(DTYPES)))
    itemsize = np.dtype(DTYPES[code]).itemsize
    sizes = random.integers(0, 5, random.integers(0, 9)).tolist()
    inner = np.sort(random.integers(0, len(sizes) + 1, random.integers(0, 4))).tolist()
    ends = [0, *inner, len(sizes)]
    pointers = [itemsize * sum(sizes[:number]) for number in range(len(sizes))]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(ends))
    body = struct.pack(f"<{len(sizes)}i{len(sizes)}q{len(ends)}q", *sizes, *pointers, *ends)
    return head + body, itemsize * sum(sizes)


def corrupt(content: bytes, bin_bytes: int, random: np.random.Generator) -> tuple[bytes, int]:
    """Damage a file in one of the ways that occur: fields, bits, ends, holes, foreign bytes, another `.bin`."""
    damaged, kind = bytearray(content), int(random.integers(0, 8))
    if kind == 0:
        return bytes(damaged[: random.integers(0, len(damaged))]), bin_bytes
    if kind == 1:
        return bytes(damaged) + random.bytes(int(random.integers(1, 40))), bin_bytes
    if kind == 2:
        return bytes(damaged), bin_bytes + int(random.integers(-bin_bytes, 20))
    if kind == 3:
        return random.bytes(len(damaged)), bin_bytes
    if kind == 4:
        offset, size = ((0, 9), (9, 8), (17, 1), (18, 8), (26, 8))[int(random.integers(0, 5))]
        few = int(random.integers(0, 20)).to_bytes(size, "little")
        damaged[offset : offset + size] = few if random.random() < 0.5 else random.bytes(size)
    elif kind == 5:
        for place in random.integers(0, len(damaged), random.integers(1, 4)):
            damaged[place] ^= 1 << int(random.integers(0, 8))
    elif kind == 6:
        for place in random.integers(34, len(damaged), random.integers(1, 4)) if len(damaged) > 34 else ():
            damaged[place] = int(random.integers(0, 256))
    else:
        first, second = (int(place) for place in np.sort(random.integers(0, len(damaged) + 1, 2)))
        damaged[first:second] = bytes(second - first)
    return bytes(damaged), bin_bytes


def by_the_description(content: bytes, bin_bytes: int) -> Said | None:
    """What a file says, read number by number; None if it says nothing that holds."""
    if len(content) < 34 or content[:9] != b"MMIDIDX\x00\x00":
        return None
    version, code, count, entries = struct.unpack("<QBQQ", content[9:34])
    if version != 1 or code not in DTYPES or len(content) != 34 + 12 * count + 8 * entries or not entries:
        return None
    sizes = list(struct.unpack_from(f"<{count}i", content, 34))
    pointers = list(struct.unpack_from(f"<{count}q", content, 34 + 4 * count))
    ends = list(struct.unpack_from(f"<{entries}q", content, 34 + 12 * count))
    at = 0
    for size, pointer in zip(sizes, pointers):
        if size < 0 or pointer != at:
            return None
        at += size * np.dtype(DTYPES[code]).itemsize
    if at != bin_bytes or ends[0] != 0 or ends[-1] != count or ends != sorted(ends):
        return None
    return code, sizes, pointers, ends


def test_of_twelve_thousand_corrupted_indices_each_is_refused_or_read_as_it_says() -> None:
    random = np.random.default_rng(7)
    refused = 0
    for _ in range(INPUTS):
        content, bin_bytes = corrupt(*whole(random), random)
        expected = by_the_description(content, bin_bytes)
        try:
            index = parse_index(np.frombuffer(content, np.uint8), bin_bytes, "fuzz.idx")
        except FormatError as error:
            assert expected is None, (content, error)
            refused += 1
            continue
        found = (index.sizes.tolist(), index.pointers.tolist(), index.documents.tolist())
        assert expected is not None and (DTYPES[expected[0]] == index.dtype, *found) == (True, *expected[1:]), content
    # Some kinds of damage leave a file that holds; most do not.
    assert INPUTS * 0.7 < refused < INPUTS
