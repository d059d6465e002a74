"""Digests differ where bytes do; on one rank, gathering is the identity."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from libai_data.delivery.gather import checksum_of, digest_of, gather_words


@given(st.binary(max_size=64), st.integers(0, 10_000), st.integers(1, 255))
def test_any_other_byte_makes_another_digest(data: bytes, place: int, change: int) -> None:
    assert digest_of(data) == digest_of(memoryview(bytearray(data)))
    assert digest_of(data) != digest_of(data + b"\0")
    if data:
        other = bytearray(data)
        other[place % len(data)] ^= change
        assert digest_of(data) != digest_of(bytes(other))


@given(st.binary())
def test_a_digest_fits_an_int64(data: bytes) -> None:
    assert 0 <= digest_of(data) < 2**63


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_and_swapped_rows_make_another_checksum(rows: int, width: int, place: int, change: int) -> None:
    array = np.random.default_rng(rows * width).integers(0, 1 << 30, (rows, width))
    other = array.copy()
    other.reshape(-1).view(np.uint8)[place % array.nbytes] ^= change
    assert checksum_of(other) != checksum_of(array)
    assert checksum_of(array.T.copy().T) == checksum_of(array)
    assert 0 <= checksum_of(array) < 2**32
    if rows > 1:
        assert checksum_of(array[::-1]) != checksum_of(array)


def test_arrays_without_items_have_a_checksum_and_on_one_rank_words_are_ones_own() -> None:
    assert checksum_of(np.zeros((0, 3))) == 0
    assert gather_words(np.array([3, -1], dtype=np.int64)).tolist() == [[3, -1]]
