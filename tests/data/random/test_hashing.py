from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from libai_data.data.random.hashing import combine64, mix64, mix64_array

uint64 = st.integers(0, 2**64 - 1)
int128 = st.integers(-(2**127), 2**127 - 1)


@given(st.lists(uint64, max_size=5))
def test_numbers_and_arrays_mix_alike(values: list[int]) -> None:
    assert mix64_array(np.array(values, dtype=np.uint64)).tolist() == [mix64(value) for value in values]


@given(uint64)
def test_mixing_can_be_undone_so_no_two_numbers_mix_alike(value: int) -> None:
    mixed = mix64(value)
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        undone = mixed
        for _ in range(64 // shift):
            undone = mixed ^ (undone >> shift)
        mixed = undone * pow(factor, -1, 2**64) % 2**64
    assert mixed == value


def test_splitmix64_gives_its_published_numbers() -> None:
    # The generator adds the golden ratio and mixes; these are its first outputs for the seed 1234567.
    golden = 0x9E3779B97F4A7C15
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [mix64(1234567 + number * golden) for number in (1, 2, 3)] == expected


@given(st.lists(int128, max_size=4), st.lists(int128, max_size=4))
def test_different_parts_combine_differently(first: list[int], second: list[int]) -> None:
    assert (combine64(*first) == combine64(*second)) == (first == second)


@given(int128, int128)
def test_the_order_of_the_parts_matters(a: int, b: int) -> None:
    assert (combine64(a, b) == combine64(b, a)) == (a == b)


@given(uint64, uint64)
def test_the_halves_of_a_part_are_told_apart(low: int, high: int) -> None:
    same = (low, high) == (high, low)
    assert (combine64(low + (high << 64)) == combine64(high + (low << 64))) == same


def test_each_input_bit_moves_about_half_of_the_output_bits() -> None:
    rng = np.random.default_rng(0)
    for bit in range(64):
        values = rng.integers(0, 2**64, 500, dtype=np.uint64)
        moved = mix64_array(values) ^ mix64_array(values ^ np.uint64(1 << bit))
        share = np.unpackbits(moved.view(np.uint8)).mean()
        assert 0.48 < share < 0.52, f"bit {bit} moves {share:.1%}"
