from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.data.datasets import random_split
from libai_data.errors import ConfigError

fractions = st.lists(st.sampled_from([0, 0.1, 0.25, 0.3, 1, 2, 17]), min_size=1, max_size=6).filter(any)


@given(st.integers(0, 3000), fractions, st.integers(-5, 2**64))
def test_parts_cover_the_dataset_once_and_have_their_fractions(size: int, fractions: list[float], seed: int) -> None:
    parts = random_split(range(size), fractions, seed)
    assert sorted(sample for part in parts for sample in map(part.__getitem__, range(len(part)))) == list(range(size))
    exact = [Fraction(repr(fraction)) for fraction in fractions]
    for part, fraction in zip(parts, exact):
        assert abs(len(part) - size * fraction / sum(exact)) < 1


def test_numbers_of_samples_are_taken_as_they_are() -> None:
    assert [len(part) for part in random_split(range(100), [70, 17, 13], 3)] == [70, 17, 13]


def test_the_seed_alone_decides() -> None:
    first, again, other = (random_split(range(500), [1, 1], seed)[0] for seed in (1, 1, 2))
    samples = [[part[index] for index in range(250)] for part in (first, again, other)]
    assert samples[0] == samples[1] != samples[2]
    assert samples[0] != sorted(samples[0])
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()


@pytest.mark.parametrize("wrong", [[], [0], [1, -1], [1, float("nan")], ["half"], [True]])
def test_fractions_that_mean_nothing_are_refused(wrong: list[Any]) -> None:
    with pytest.raises(ConfigError, match="fractions are"):
        random_split(range(9), wrong)


def test_a_seed_that_is_no_int_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"seed is 0\.5"):
        random_split(range(9), [1, 1], 0.5)  # type: ignore[arg-type]


def test_an_index_outside_a_part_is_refused() -> None:
    with pytest.raises(IndexError, match=r"index 5 .*5 samples"):
        random_split(range(10), [1, 1])[0][5]
