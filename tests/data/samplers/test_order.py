from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai_data.data.samplers.order import ORDER_VERSION, Order
from libai_data.errors import ConfigError
from tests.properties import examples, slowly

SORTED_BELOW = 1024
"""Below this size the order is a sort of hashes, from here on a Feistel network."""

ABOVE_THE_BORDER = [1024, *map(slowly, (1025, 2047)), 10_000, slowly(65_536), 99_991]

seeds = st.integers(-(2**63), 2**64)
epochs = st.integers(0, 10**6)


def epoch_of(order: Order, epoch: int) -> np.ndarray:
    """All indices of one epoch."""
    return order.locate(epoch * order.epoch_size + np.arange(order.epoch_size))[1]


def assert_permutation(indices: np.ndarray, size: int) -> None:
    seen = np.zeros(size, dtype=bool)
    seen[indices] = True
    assert len(indices) == size
    assert indices.min() >= 0
    assert seen.all()


def improbability(counts: np.ndarray, expected: float, freedom: int = 0) -> float:
    """How many standard deviations the chi-square statistic of equally likely cells lies above its mean.

    `freedom` is by default one less than the cells. By Wilson and Hilferty's cube-root approximation, which makes the
    statistic nearly normal.
    """
    freedom = freedom or counts.size - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


def test_every_size_up_to_600_and_around_the_border_is_permuted() -> None:
    for size in [*range(1, 601), *range(SORTED_BELOW - 40, SORTED_BELOW + 300)]:
        for seed, epoch in ((0, 0), (size, 3)):
            assert_permutation(epoch_of(Order(size, seed), epoch), size)


@settings(max_examples=examples(25))
@given(st.integers(1, 10**6), seeds, epochs)
def test_any_size_is_permuted(size: int, seed: int, epoch: int) -> None:
    assert_permutation(epoch_of(Order(size, seed), epoch), size)


@settings(max_examples=examples(30))
@given(
    st.sampled_from([10**9, 2**31, 2**32 + 1, 2**40, 2**40 - 1, 10**12 + 39]),
    seeds,
    epochs.filter(lambda epoch: epoch < 2**20),
    st.data(),
)
def test_in_huge_datasets_distinct_positions_have_distinct_indices_in_range(
    size: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    offsets = data.draw(st.sets(st.integers(0, size - 1), min_size=2, max_size=200))
    found_epochs, indices = Order(size, seed).locate(epoch * size + np.array(sorted(offsets)))
    assert set(found_epochs.tolist()) == {epoch}
    assert indices.min() >= 0
    assert indices.max() < size
    assert len(set(indices.tolist())) == len(offsets)


@given(st.integers(1, 3000), seeds, st.lists(st.integers(0, 10**5), min_size=1, max_size=50))
def test_positions_are_located_alike_alone_together_and_in_any_order(
    size: int, seed: int, positions: list[int]
) -> None:
    order = Order(size, seed)
    found_epochs, indices = order.locate(np.array(positions))
    assert found_epochs.tolist() == [position // size for position in positions]
    assert indices.dtype == found_epochs.dtype == np.int64
    assert indices.tolist() == [int(order.locate(np.array([position]))[1][0]) for position in positions]


@given(st.integers(1, 2000), seeds, st.integers(0, 10**12))
def test_without_shuffling_the_order_is_the_datasets_own(size: int, seed: int, position: int) -> None:
    found_epochs, indices = Order(size, seed, shuffle=False).locate(np.array([position]))
    assert (int(found_epochs[0]), int(indices[0])) == divmod(position, size)


@settings(max_examples=examples(30))
@given(st.integers(2, 3000), st.data(), seeds, epochs)
def test_a_shorter_epoch_is_the_beginning_of_the_whole_one(
    size: int, data: st.DataObject, seed: int, epoch: int
) -> None:
    shorter = data.draw(st.integers(1, size))
    whole = epoch_of(Order(size, seed), epoch)
    np.testing.assert_array_equal(epoch_of(Order(size, seed, epoch_size=shorter), epoch), whole[:shorter])


@pytest.mark.parametrize("size", [20, 1000, 1024, 5000])
def test_each_epoch_and_each_seed_has_another_order(size: int) -> None:
    orders = [epoch_of(Order(size, seed), epoch) for seed in (0, 1, 2, -1, 2**64, 10**18) for epoch in range(50)]
    assert len({order.tobytes() for order in orders}) == len(orders)
    # And they are not related either: two random permutations agree in one place on average.
    agreements = [int((first == second).sum()) for first, second in zip(orders, orders[1:])]
    assert abs(np.mean(agreements) - 1) < 0.35
    assert max(agreements) < 10


@pytest.mark.parametrize("size", [2, *map(slowly, (3, 4, 5, 6, 7, 8)), 12, *map(slowly, (31, 1024, 1087))])
@pytest.mark.parametrize("varied", ["epoch", "seed"])
def test_each_index_is_as_likely_at_each_position(size: int, varied: str) -> None:
    trials = 4000 if size < 100 else 300
    positions = np.arange(size) if size < 100 else np.arange(0, size, size // 12)
    columns = min(size, 32)
    counts = np.zeros((len(positions), columns))
    rows = np.arange(len(positions))
    for trial in range(trials):
        seed, epoch = (7, trial) if varied == "epoch" else (trial, 7)
        indices = Order(size, seed).locate(epoch * size + positions)[1]
        np.add.at(counts, (rows, indices * columns // size), 1)
    widths = np.bincount(np.arange(size) * columns // size, minlength=columns)
    for row in counts:
        scaled = row * (size / columns) / widths
        assert improbability(scaled, trials / columns) < 4.5


@pytest.mark.parametrize("size", [2, 3, 4])
def test_small_datasets_take_all_of_their_orders_equally_often(size: int) -> None:
    trials = 6000
    orders = [tuple(epoch_of(Order(size, seed), epoch).tolist()) for seed in range(60) for epoch in range(100)]
    counts = np.unique(np.array(orders), axis=0, return_counts=True)[1]
    assert len(counts) == math.factorial(size)
    assert improbability(counts.astype(float), trials / math.factorial(size)) < 4.5


@pytest.mark.parametrize("size", ABOVE_THE_BORDER)
@pytest.mark.parametrize("seed", [0, slowly(1)])
def test_above_the_border_positions_and_indices_are_independent(size: int, seed: int) -> None:
    buckets = 8
    counts = np.zeros((buckets, buckets))
    trials = max(2, 200_000 // size)
    for epoch in range(trials):
        bucket = epoch_of(Order(size, seed), epoch) * buckets // size
        np.add.at(counts, (np.arange(size) * buckets // size, bucket), 1)
    # A permutation's rows and columns have fixed sums.
    assert abs(improbability(counts, trials * size / buckets**2, freedom=(buckets - 1) ** 2)) < 4.5


@pytest.mark.parametrize("size", ABOVE_THE_BORDER)
def test_above_the_border_indices_a_few_positions_apart_are_independent(size: int) -> None:
    buckets, lags = 8, (1, 2, 32)
    counts = np.zeros((len(lags), buckets, buckets))
    for epoch in range(max(2, 200_000 // size)):
        bucket = epoch_of(Order(size, seed=3), epoch) * buckets // size
        for number, lag in enumerate(lags):
            np.add.at(counts[number], (bucket[:-lag], bucket[lag:]), 1)
    for of_lag in counts:
        assert improbability(of_lag, of_lag.mean()) < 4.5


@pytest.mark.parametrize("size", [1024, 2047, 10_000, 10**9])
def test_above_the_border_the_difference_of_neighbours_is_spread_evenly(size: int) -> None:
    cells = 64
    counts = np.zeros(cells)
    for epoch in range(20):
        indices = Order(size, seed=11).locate(epoch * size + np.arange(1000))[1]
        np.add.at(counts, np.diff(indices) % size * cells // size, 1)
    widths = np.bincount(np.arange(1, size) * cells // size, minlength=cells) if size < 10**6 else np.ones(cells)
    assert improbability(counts * widths.mean() / widths, counts.mean()) < 4.5


def known_answers() -> Iterator[tuple[Order, int, list[int]]]:
    yield Order(1), 3, [0]
    yield Order(8), 0, [7, 5, 3, 0, 1, 6, 2, 4]
    yield Order(8), 1, [5, 6, 1, 7, 3, 0, 4, 2]
    yield Order(1000, seed=42), 2, [424, 218, 870, 392, 385, 510, 819, 695]
    yield Order(1024, seed=-1), 0, [402, 391, 320, 386, 1020, 137, 666, 412]
    billion = [324693493, 357896098, 872342234, 503799451, 521316587, 643848199, 990771566, 849024284]
    yield Order(10**9, seed=1234), 5, billion
    thousand_billions = [
        *(728549989574, 13639595082, 1006862995694, 279205350928),
        *(539770847447, 15218047006, 202637952670, 1060127479853),
    ]
    yield Order(2**40, seed=2**63), 1, thousand_billions


def test_order_version_1_is_pinned() -> None:
    # Whoever changes these answers raises ORDER_VERSION: saved states of older versions would go on elsewhere.
    assert ORDER_VERSION == 1
    for order, epoch, expected in known_answers():
        count = min(order.size, 8)
        assert order.locate(epoch * order.size + np.arange(count))[1].tolist() == expected
    digest = hashlib.sha256()
    for size in (1, 2, 3, 100, 1023, 1024, 1025, 20_000):
        for seed, epoch in ((0, 0), (1, 7), (2**40, 100)):
            digest.update(epoch_of(Order(size, seed), epoch).astype("<i8").tobytes())
    assert digest.hexdigest() == "4c7aaf2afebd6d747f1490b47a0b3deb5c76fa213a85ac6a3a65c5a4bf0c07b9"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "dataset is empty.*0 samples"),
        ({"size": 10, "epoch_size": 11}, "epoch_size is 11.*1 to 10"),
        ({"size": 10, "epoch_size": -1}, "epoch_size is -1"),
        ({"size": 10, "seed": None}, "seed is None"),
        ({"size": 10, "seed": 1.5}, "seed is 1.5"),
        ({"size": 10, "seed": "1"}, "seed is '1'"),
    ],
)
def test_bad_arguments_are_refused_by_name_and_value(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Order(**arguments)


def test_an_order_is_a_value() -> None:
    assert Order(10, seed=np.int64(3)) == Order(10, seed=3)  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Order(10).seed = 1  # type: ignore[misc]
