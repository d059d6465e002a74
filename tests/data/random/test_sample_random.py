from __future__ import annotations

import random
import threading
from typing import Any, Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from libai_data.data.random.global_generators import seeded
from libai_data.data.random.hashing import combine64
from libai_data.data.random.sample_random import passing_generator, reading_samples, sample_generator, sample_generators

keys = st.tuples(st.integers(-(2**63), 2**64), st.integers(0, 2**40), st.integers(0, 2**50))
Key = tuple[int, int, int]


def drawn(key: Key, stream: int = 0) -> list[int]:
    with reading_samples((key,)):
        return sample_generator(stream).integers(0, 2**63, 4).tolist()


def drawn_globally(key: Key) -> list[float]:
    with reading_samples((key,)), seeded(combine64(*key)):
        return [random.random(), random.random(), float(np.random.random()), float(np.random.normal())]


def shared_draws(between: Callable[[], object] = int) -> tuple[float, float]:
    """What Python's and numpy's generators draw after something else was done."""
    random.seed(5)
    np.random.seed(5)
    between()
    return random.random(), float(np.random.random())


@given(keys, st.integers(0, 100))
def test_a_sample_draws_the_same_whenever_it_is_read(key: Key, stream: int) -> None:
    expected = drawn(key, stream)
    drawn((1, 2, 3))
    sample_generator().random()
    assert drawn(key, stream) == expected


@given(keys, keys, st.integers(0, 5), st.integers(0, 5))
def test_other_samples_and_streams_draw_otherwise(first: Key, second: Key, stream: int, other: int) -> None:
    assert (drawn(first, stream) == drawn(second, other)) == ((first, stream) == (second, other))


def test_seed_epoch_and_index_cannot_stand_in_for_each_other() -> None:
    near = [(seed, epoch, index) for seed in range(8) for epoch in range(8) for index in range(8)]
    assert len({tuple(drawn(key)) for key in near}) == len(near)


def test_neighbouring_samples_are_uniform_and_uncorrelated() -> None:
    values = []
    for index in range(4000):
        with reading_samples(((0, 0, index),)):
            values.append(sample_generator().random(2))
    table = np.array(values)
    assert abs(table.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(table[:-1, 0], table[1:, 0])[0, 1]) < 0.06
    assert abs(np.corrcoef(table[:, 0], table[:, 1])[0, 1]) < 0.06


def test_the_generator_of_a_sample_stays_the_same_in_all_versions() -> None:
    # Whoever changes this answer makes a resumed training draw otherwise than an uninterrupted one.
    with reading_samples(((1, 2, 3),)):
        drawn_words = [sample_generator(stream).bit_generator.random_raw() for stream in range(2)]
    assert drawn_words == [15312048596169814744, 8769622985746916502]


def test_the_whole_of_a_key_goes_into_the_generator() -> None:
    # Numpy makes floats of a list with numbers on either side of 2**63, so that low bits would be lost.
    for index in range(200):
        with reading_samples(((0, 0, index),)):
            state: dict[str, Any] = dict(sample_generator().bit_generator.state)
        assert any(int(word) % 2**11 for word in state["state"]["key"])


@given(st.lists(keys, min_size=1, max_size=5))
def test_samples_read_together_draw_as_if_read_alone(together: list[Key]) -> None:
    with reading_samples(together):
        found = [generator.integers(0, 2**63, 4).tolist() for generator in sample_generators()]
    assert found == [drawn(key) for key in together]


@given(keys)
def test_transforms_of_other_libraries_draw_the_same_whenever_the_sample_is_read(key: Key) -> None:
    expected = drawn_globally(key)
    random.random()
    np.random.random()
    assert drawn_globally(key) == expected
    assert drawn_globally((key[0] + 1, *key[1:])) != expected


@given(keys)
def test_the_global_generators_go_on_as_if_nothing_had_been_read(key: Key) -> None:
    expected = shared_draws()
    assert shared_draws(lambda: drawn_globally(key)) == expected


def test_outside_a_loader_nothing_is_seeded() -> None:
    assert shared_draws(sample_generator) == shared_draws()
    assert sample_generator().random() != sample_generator().random()
    assert sample_generators() == []


def test_a_read_that_fails_leaves_no_sample_behind() -> None:
    try:
        with reading_samples(((1, 2, 3),)), seeded(1):
            raise KeyError
    except KeyError:
        pass
    assert sample_generators() == []


def test_threads_do_not_disturb_each_other() -> None:
    expected = {index: drawn_globally((0, 0, index)) for index in range(40)}
    found: dict[int, list[float]] = {}

    def read(indices: range) -> None:
        for index in indices:
            found[index] = drawn_globally((0, 0, index))

    threads = [threading.Thread(target=read, args=(range(first, 40, 4),)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


@given(st.tuples(st.integers(0, 2**63), st.integers(0, 99), st.integers(0, 2**62)))
def test_a_passing_generator_draws_what_the_samples_own_draws(key: tuple[int, int, int]) -> None:
    with reading_samples((key,)):
        with passing_generator() as used:
            used.random(3)
            used.integers(9, dtype=np.int32)
        own = sample_generator()
        with passing_generator() as passing:
            assert (
                passing.integers(1 << 31, size=3, dtype=np.int32).tolist()
                == own.integers(1 << 31, size=3, dtype=np.int32).tolist()
            )
            with passing_generator() as inner:
                inner.random(7)
            assert passing.random(5).tolist() == own.random(5).tolist(), "the inner one leaves the outer one as it is"
