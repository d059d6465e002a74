"""Draws by weights: their frequencies, and that each follows from seed and place alone."""

from __future__ import annotations

import hashlib
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai_data.config import LazyCall
from libai_data.data.datasets.blend import BlendedDataset
from libai_data.data.datasets.stream_transform import FilteredDataset
from libai_data.data.random.sample_random import sample_generator
from libai_data.data.samplers import CyclicSampler, Ledger, SingleRoundSampler, StepSchedule, StreamState
from libai_data.data.samplers.weighted_order import WeightedOrder, _exponential, drawn_order
from libai_data.delivery.build import build_image_train_loader
from libai_data.errors import CheckpointError, ConfigError
from tests.data.samplers.test_order import improbability
from tests.properties import examples

some_weights = st.lists(st.sampled_from([0, 1, 2, 0.5, 1e-3, 1e6]), min_size=1, max_size=40).filter(any)


def order_of(weights: Any, num_samples: int | None = None, replacement: bool = True, seed: int = 0) -> WeightedOrder:
    order = drawn_order(range(len(weights)), seed, weights, num_samples, replacement)
    assert order is not None
    return order


def drawn(order: WeightedOrder, places: Any) -> np.ndarray:
    return order.locate(np.asarray(places))[1]


def test_samples_come_as_often_as_their_weights_say() -> None:
    weights = np.array([1, 2, 0, 3, 0.5, 10])
    counts = np.bincount(drawn(order_of(weights), np.arange(200_000)), minlength=6)
    assert counts[2] == 0
    expected = 200_000 * weights / weights.sum()
    assert improbability(counts[weights > 0], expected[weights > 0]) < 4


def test_draws_without_replacement_are_successive_draws_by_weight() -> None:
    weights = np.array([1.0, 2.0, 5.0])
    order = order_of(weights, 3, replacement=False)
    epochs = drawn(order, np.arange(3 * 2000)).reshape(-1, 3)
    pairs = np.zeros((3, 3))
    np.add.at(pairs, (epochs[:, 0], epochs[:, 1]), 1)
    share = weights / weights.sum()
    expected = share[:, None] * share / (1 - share[:, None])
    off_diagonal = ~np.eye(3, dtype=bool)
    assert pairs.diagonal().sum() == 0
    assert improbability(pairs[off_diagonal], 2000 * expected[off_diagonal]) < 4


@settings(max_examples=examples(50))
@given(some_weights, st.booleans(), st.integers(-(2**63), 2**64), st.data())
def test_any_place_draws_what_the_whole_stream_has_there(
    weights: list[float], replacement: bool, seed: int, data: st.DataObject
) -> None:
    most = 60 if replacement else np.count_nonzero(weights)
    order = order_of(weights, data.draw(st.integers(1, int(most))), replacement, seed)
    epochs, whole = order.locate(np.arange(5 * order.epoch_size))
    assert np.asarray(weights)[whole].all()
    places = data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=20))
    np.testing.assert_array_equal(drawn(order, np.array(places, dtype=np.int64)), whole[places])
    assert len(set(zip(epochs.tolist(), whole.tolist()))) == len(whole), "no sample comes twice with the same draws"
    index = data.draw(st.integers(0, len(weights) - 1))
    first, end = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    used_epochs, used = order.uses_of(index, first, end)
    np.testing.assert_array_equal(used, first + np.flatnonzero(whole[first:end] == index))
    np.testing.assert_array_equal(used_epochs, epochs[used])


@settings(max_examples=examples(30))
@given(some_weights, st.sampled_from([1, 2, 4]), st.booleans(), st.booleans())
def test_ranks_together_take_the_draws_in_their_order(
    weights: list[float], ranks: int, endless: bool, drop_last: bool
) -> None:
    kind: Any = CyclicSampler if endless else SingleRoundSampler
    samplers = [
        kind(
            range(len(weights)),
            8 // ranks,
            data_parallel_rank=rank,
            data_parallel_size=ranks,
            drop_last=drop_last,
            weights=weights,
            num_samples=30,
            seed=5,
        )
        for rank in range(ranks)
    ]
    whole = drawn(samplers[0].order, np.arange(90)).tolist()
    for start in (0, 8, 16) if endless else (0, 30):
        batches = [list(islice(sampler.batches(start), 1 if endless else None)) for sampler in samplers]
        rows = [
            [index for part in parts for index in part.indices.tolist()][: parts[0].valid] for parts in zip(*batches)
        ]
        assert [row for batch in rows for row in batch] == whole[
            start : start + (8 if endless else 24 if drop_last else 30)
        ]


def test_draws_stay_the_same_in_all_versions_and_on_all_machines() -> None:
    # Whoever changes these answers raises the version of the draws: saved states would go on elsewhere.
    digest = hashlib.sha256()
    for replacement in (True, False):
        order = order_of(np.arange(1000) % 17, 300, replacement, seed=7)
        digest.update(drawn(order, np.arange(900)).astype("<i8").tobytes())
        assert order.to_json()["order_version"] == 1
    assert digest.hexdigest() == "940ec788740f4d6bf09ab549f2ef087110949e9cc84826f0681d6f4e935955fa"


def test_exponential_draws_are_logarithms() -> None:
    uniform = np.linspace(0, 1, 10_001)[:-1]
    np.testing.assert_allclose(_exponential(uniform), -np.log1p(-uniform), rtol=1e-11, atol=1e-15)


class Drawing:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return {"draw": sample_generator().integers(1 << 40)}


def test_random_transforms_of_a_sample_differ_each_time_it_is_drawn() -> None:
    loader, _, _ = build_image_train_loader(Drawing(), 2, weights=[0, 1], num_workers=0)
    batches = iter(loader)
    draws = [draw for _ in range(8) for draw in next(batches)["draw"].numpy().tolist()]
    assert len(set(draws)) == 16


def test_a_builder_takes_weights_and_its_sampler_says_how_to_draw() -> None:
    sampler = LazyCall(CyclicSampler)(replacement=False, num_samples=4)
    loader, _, _ = build_image_train_loader(
        [{"x": n} for n in range(9)], 4, sampler=sampler, weights=[0, 1, 5] * 3, num_workers=0
    )
    batches = iter(loader)
    for _ in range(5):
        rows = next(batches)["x"].numpy().tolist()
        assert len(set(rows)) == 4 and not {0, 3, 6} & set(rows)


def test_a_state_holds_a_digest_and_fits_proportional_weights_only() -> None:
    def sampler(weights: Any, **arguments: Any) -> CyclicSampler:
        return CyclicSampler(range(3), 1, weights=weights, **arguments)

    saved = sampler([1, 2, 3])
    saved.position = 7
    state = saved.state_dict()
    proportional = sampler([2, 4, 6])
    proportional.load_state_dict(state)
    assert proportional.batch_at(7).indices == saved.batch_at(7).indices  # type: ignore[union-attr]
    others = [
        sampler([1, 2, 4]),
        sampler([1, 2, 3], num_samples=2, replacement=False),
        sampler([1, 2, 3], num_samples=9),
        CyclicSampler(range(3), 1),
    ]
    for other in others:
        with pytest.raises(CheckpointError, match=r"(weights|num_samples) w.*train.resume_override=\[weights\]"):
            other.load_state_dict(state)
        other.load_state_dict(state, override=["weights"])
        assert other.position // other.order.epoch_size == 2
    kept = StreamState.from_json({**state, "batch_sizes": [[0, 1]], "first_position": 0})
    with pytest.raises(CheckpointError, match="holds only a digest"):
        Ledger(kept).samples_of(0)
    saved.follow(StepSchedule(((0, 1),)))
    assert len(Ledger(saved.state).samples_of(4)[1]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": [1, 2]}, r"weights are int64 \[2\]; they must be 3 numbers"),
        ({"weights": "abc"}, "they must be 3 numbers"),
        ({"weights": [1, -1, 0]}, r"weights has -1.0 for sample 1"),
        ({"weights": [1, 1, float("nan")]}, r"weights has nan for sample 2"),
        ({"weights": [float("inf"), 1, 1]}, r"weights has inf for sample 0"),
        ({"weights": [0, 0, 0]}, "all 3 weights are 0"),
        ({"weights": [1, 1, 1], "num_samples": 0}, "num_samples is 0"),
        ({"weights": [1, 1, 1], "replacement": False}, "num_samples is needed"),
        ({"weights": [1, 0, 1], "replacement": False, "num_samples": 3}, "only 2 of 3 samples have a weight above 0"),
        ({"num_samples": 2}, "num_samples is 2, but there are no weights;.* set weights, too"),
        ({"replacement": False}, "set weights, too"),
    ],
)
@pytest.mark.parametrize("kind", [CyclicSampler, SingleRoundSampler])
def test_what_makes_no_sense_is_refused(kind: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(range(3), 1, **arguments)


def test_blends_and_streams_have_no_weights_of_single_samples() -> None:
    for dataset in (BlendedDataset([Drawing(), Drawing()], [1, 1]), FilteredDataset(range(4), bool)):
        with pytest.raises(ConfigError, match=f"weights are given for a {type(dataset).__name__}"):
            CyclicSampler(dataset, 1, weights=[1] * 4)


class Mixing(list[Any]):
    """A dataset with an attribute of its own that has the name of an attribute of blends."""

    blend = np.array([0.5, 0.5])


def test_a_dataset_is_no_blend_by_the_name_of_an_attribute() -> None:
    assert len(CyclicSampler(Mixing(range(4)), 2, weights=[1] * 4)) == 4


def test_weights_of_any_size_are_added_up_without_overflow() -> None:
    assert set(drawn(order_of([1e308] * 40 + [0]), np.arange(400)).tolist()) == set(range(40))


def test_very_unequal_weights_draw_the_same_whatever_numpy_does_about_small_numbers() -> None:
    orders = [order_of([1e-300, 1e300, 1.0], num_samples, num_samples is None) for num_samples in (None, 2)]
    plain = [drawn(order, np.arange(8)).tolist() for order in orders]
    with np.errstate(all="raise"):
        again = [order_of([1e-300, 1e300, 1.0], num_samples, num_samples is None) for num_samples in (None, 2)]
        assert [drawn(order, np.arange(8)).tolist() for order in again] == plain


def test_a_sample_without_weight_is_not_drawn_instead_of_one_with_a_tiny_weight() -> None:
    order = order_of([0, 1, 1e-308, 0], 2, replacement=False)
    assert sorted(set(drawn(order, np.arange(2000)).tolist())) == [1, 2]
