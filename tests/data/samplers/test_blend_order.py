"""A blend has its proportions at every prefix; it loses and repeats nothing where it is cut, or its weights change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from libai_data.data.datasets import (
    Blend,
    BlendedDataset,
    ConcatDataset,
    FilteredDataset,
    LabelledImages,
    Map,
    OneRound,
    RandomMap,
    Subset,
    random_split,
)
from libai_data.data.datasets.blend import LONGEST_PERIOD, proportions
from libai_data.data.random.hashing import combine64
from libai_data.data.samplers import BlendOrder, CyclicSampler, Order, SingleRoundSampler, StepSchedule
from libai_data.data.samplers.blend_turns import phases_of, turns_of
from libai_data.data.sources import InMemorySource
from libai_data.errors import CheckpointError, ConfigError
from tests.loader.sample_datasets import OneByOne
from tests.properties import examples

LENGTH = 300


class Numbers:
    """A dataset whose samples say where they come from."""

    def __init__(self, size: int, number: int = 0) -> None:
        self.size = size
        self.number = number

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.array([self.number, index])}


def blended(sizes: Sequence[int], weights: Sequence[float], changes: Any = None, **options: Any) -> BlendedDataset:
    return BlendedDataset([Numbers(size, number) for number, size in enumerate(sizes)], weights, changes, **options)


def order_of(blend: Blend, seed: int = 1, shuffle: bool = True) -> BlendOrder:
    return BlendOrder(sum(blend.sizes), seed, shuffle, blend=blend)


@st.composite
def blends(draw: st.DrawFn, most_phases: int = 3) -> Blend:
    count = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))
    starts = [0, *sorted(draw(st.sets(st.integers(1, LENGTH), max_size=most_phases - 1)))]
    weights = st.lists(st.integers(0, 30), min_size=count, max_size=count).filter(any)
    phases = [(start, draw(weights)) for start in starts]
    limits: tuple[Any, ...] = ()
    if draw(st.booleans()):
        # The first one is never used up.
        phases = [(start, [counts[0] + 1, *counts[1:]]) for start, counts in phases]
        some = st.one_of(st.none(), st.integers(0, 90))
        limits = (None, *draw(st.lists(some, min_size=count - 1, max_size=count - 1)))
    return Blend(tuple(sizes), tuple((start, proportions(counts)) for start, counts in phases), (), limits)


def datasets_of(order: Any, indices: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.cumsum(order.blend.sizes), indices, side="right")


@given(blends())
def test_every_prefix_of_a_phase_has_the_proportions_to_less_than_one_sample(blend: Blend) -> None:
    order = order_of(blend)
    phases = phases_of(blend).phases
    ends = [*(start for start, _ in phases[1:]), phases[-1][0] + LENGTH]
    for (start, counts), end in zip(phases, ends):
        datasets = datasets_of(order, order.locate(np.arange(start, end))[1])
        taken = np.cumsum(datasets[:, None] == np.arange(len(counts)), axis=0)
        wanted = np.arange(1, end - start + 1)[:, None] * np.array(counts)
        # In whole numbers: |taken - wanted / period| < 1.
        assert (np.abs(taken * sum(counts) - wanted) < sum(counts)).all()


@given(blends())
def test_a_dataset_comes_until_its_limit_and_the_others_have_its_share_from_there_on(blend: Blend) -> None:
    assume(blend.limits)
    datasets = datasets_of(order_of(blend), order_of(blend).locate(np.arange(2 * LENGTH))[1]).tolist()
    taken, left = [0] * len(blend.sizes), list(blend.limits)
    weights: list[int] = []
    expected, begin = [], 0
    for place in range(2 * LENGTH):
        declared = blend.before(place + 1)[-1][1]
        counts = [0 if left[number] == 0 else count for number, count in enumerate(declared)]
        counts = [count // int(np.gcd.reduce(counts)) for count in counts]
        if weights != counts:
            weights, begin = counts, place
        number = int(turns_of(tuple(counts)).datasets[(place - begin) % sum(counts)])
        taken[number] += 1
        limit = left[number]
        left[number] = None if limit is None else limit - 1
        expected.append(number)
    assert datasets == expected
    assert all(most is None or count <= most for count, most in zip(taken, blend.limits))


@given(blends(), st.integers(0, 2**63), st.booleans())
def test_each_dataset_goes_through_its_own_order_and_no_change_of_weights_loses_or_repeats(
    blend: Blend, seed: int, shuffle: bool
) -> None:
    order = order_of(blend, seed, shuffle)
    epochs, indices = order.locate(np.arange(2 * LENGTH))
    datasets, first = datasets_of(order, indices), 0
    for number, size in enumerate(blend.sizes):
        own = datasets == number
        expected = Order(size, combine64(seed, number), shuffle).locate(np.arange(own.sum()))
        np.testing.assert_array_equal(epochs[own], expected[0])
        np.testing.assert_array_equal(indices[own] - first, expected[1])
        first += size


@settings(max_examples=examples(40))
@given(blends(), st.data())
def test_any_places_are_found_by_themselves_and_back(blend: Blend, data: st.DataObject) -> None:
    order = order_of(blend)
    epochs, indices = order.locate(np.arange(LENGTH))
    places = np.array(data.draw(st.lists(st.integers(0, LENGTH - 1), min_size=1, max_size=9)))
    np.testing.assert_array_equal(order.locate(places), (epochs[places], indices[places]))
    index = int(indices[places[0]])
    first, end = sorted(data.draw(st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH))))
    used = [place for place in range(first, end) if indices[place] == index]
    np.testing.assert_array_equal(np.stack(order.uses_of(index, first, end)), np.stack([epochs[used], np.array(used)]))


def test_a_place_far_out_is_found_at_once_and_exactly() -> None:
    blend = blended([7, 10**9, 1234], [0.1, 0.2, 0.7], {5 * 10**11: [0.4, 0.5, 0.1]}).blend
    taken = order_of(blend).taken_before(10**12)
    assert taken == tuple(int(5 * 10**10 * (a + b)) for a, b in ((1, 4), (2, 5), (7, 1)))


@given(st.lists(st.one_of(st.integers(0, 10**12), st.floats(0, 1e9)), min_size=1, max_size=30))
def test_weights_are_exact_or_the_nearest_of_the_longest_period(weights: list[float]) -> None:
    assume(any(weights))
    counts = proportions(weights)
    exact = [Fraction(repr(weight)) if isinstance(weight, float) else Fraction(weight) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    used = [Fraction(count, sum(counts)) for count in counts]
    assert [bool(share) for share in used] == [bool(share) for share in shares]
    assert sum(counts) <= LONGEST_PERIOD
    if used != shares:
        assert all(abs(mine - share) <= Fraction(len(weights), LONGEST_PERIOD) for mine, share in zip(used, shares))
        period = np.lcm.reduce(np.array([share.denominator for share in shares], dtype=object))
        assert period > LONGEST_PERIOD, "these could have been exact"


def resumed(saved: CyclicSampler, dataset: BlendedDataset, override: tuple[str, ...] = ()) -> Any:
    sampler = CyclicSampler(dataset, 4, shuffle=True, seed=1)
    sampler.load_state_dict(json.loads(json.dumps(saved.state_dict())), override)
    return sampler


SIZES = (10, 20, 30)


def at(place: int, weights: Sequence[float], changes: Any = None) -> CyclicSampler:
    return CyclicSampler(blended(SIZES, weights, changes), 4, shuffle=True, seed=1, consumed_samples=place)


def test_other_weights_are_refused_with_both_and_taken_over_exactly_when_allowed(caplog: Any) -> None:
    saved = at(41, [1, 2, 3])
    with pytest.raises(CheckpointError, match=r"\[1, 2, 3\].*\[3, 2, 1\].*resume_override=\[weights\]"):
        resumed(saved, blended(SIZES, [3, 2, 1]))
    sampler = resumed(saved, blended(SIZES, [3, 2, 1]), ("weights",))
    assert "no sample is repeated or left out" in caplog.text
    assert sampler.order == at(0, [1, 2, 3], {41: [3, 2, 1]}).order
    # A second resume, with the config that has only the new weights, needs no word more.
    sampler.set_consumed_samples(60)
    for override in ((), ("weights",)):
        assert resumed(sampler, blended(SIZES, [3, 2, 1]), override).order == sampler.order


def test_weights_may_be_told_to_change_later_without_a_word() -> None:
    changed = {50: [3, 2, 1]}
    assert resumed(at(41, [1, 2, 3]), blended(SIZES, [1, 2, 3], changed)).order == at(0, [1, 2, 3], changed).order


def test_other_sizes_are_another_dataset() -> None:
    with pytest.raises(CheckpointError, match=r"\[10, 20, 30\].*\[30, 20, 10\].*resume_override=\[dataset\]"):
        resumed(at(4, [1, 2, 3]), blended((30, 20, 10), [1, 2, 3]))


def limited(place: int, *max_epochs: float | None, weights: Sequence[float] = (1, 2, 3)) -> Any:
    dataset = blended(SIZES, weights, max_epochs=max_epochs)
    return CyclicSampler(dataset, 4, shuffle=True, seed=1, consumed_samples=place)


def weights_of(sampler: CyclicSampler) -> Any:
    """The weights in effect from each place on."""
    return phases_of(sampler.order.blend).phases  # type: ignore[attr-defined]


def test_limits_that_change_for_what_is_to_come_need_no_word_and_those_of_the_past_need_one(caplog: Any) -> None:
    saved = limited(60, 1.5, None, None)
    assert resumed(saved, limited(0, 2, None, None).dataset).order == limited(0, 2, None, None).order
    # At place 120 the first has ended.
    saved = limited(120, 1.5, None, None)
    assert 2 not in saved.order.uses_of(3, 0, 1000)[0]
    assert weights_of(resumed(saved, limited(0, 1.5, None, 4).dataset)) == weights_of(limited(0, 1.5, None, 4))
    with pytest.raises(CheckpointError, match=r"\[0, 2, 3\] from position.*resume_override=\[weights\]"):
        resumed(saved, limited(0, 2, None, None).dataset)
    sampler = resumed(saved, limited(0, 2, None, 2).dataset, ("weights",))
    past, now = saved.order.locate(np.arange(120)), sampler.order.locate(np.arange(1000))
    np.testing.assert_array_equal(now[1][:120], past[1])
    # 5 samples more of the first; and the third had more than its new limit.
    assert np.bincount(datasets_of(sampler.order, now[1])).tolist()[::2] == [20, 60 + 3]
    for override in ((), ("weights",)):
        assert weights_of(resumed(sampler, limited(0, 2, None, 2).dataset, override)) == weights_of(sampler)


def test_weights_that_change_at_a_resume_keep_what_was_taken_to_the_limits() -> None:
    saved = limited(61, 1.5, None, 2)
    sampler = resumed(saved, limited(0, 1.5, None, 2, weights=(3, 2, 1)).dataset, ("weights",))
    indices = sampler.order.locate(np.arange(1000))[1]
    np.testing.assert_array_equal(indices[:61], saved.order.locate(np.arange(61))[1])
    assert np.bincount(datasets_of(sampler.order, indices)).tolist()[::2] == [15, 60]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: blended([3, 4], [0, 0]), "at least"),
        (lambda: blended([3, 4], [1, -1]), "-1"),
        (lambda: blended([3, 4], [1]), "1 weights"),
        (lambda: blended([3, 0], [1, 1]), "dataset 1 of a blend is empty"),
        (lambda: blended([3, 4], [1, 1], {-1: [1, 2]}), "change at -1"),
        (lambda: blended([3, 4], [1, 1], {2.5: [1, 2]}), r"change at 2\.5"),
        (lambda: blended([3, 4], [1, 1], {0: [1, 2]}), "change at 0; give a position, an int of at least 1"),
        (lambda: blended([3, 4], [1, 1], {"3": [1, 2]}), "change at '3'"),
        (lambda: limited(0, 1, 2, 3), r"after 140 samples .* has reached its max_epochs.*give one dataset None"),
        (lambda: limited(0, 1, None), "2 entries for the 3 datasets"),
        (lambda: limited(0, 1, None, 2, 3), "4 entries for the 3 datasets"),
        (lambda: limited(0, 0, None, 1), "; 0 is not allowed: give a number above 0"),
        (lambda: limited(0, None, None, "2"), "'2' is not allowed"),  # type: ignore[arg-type]
        (lambda: CyclicSampler(blended((10, 11), [1, 1]), 4, drop_last=True), "drop_last=False"),
    ],
)
def test_weights_and_limits_that_mean_nothing_or_end_the_stream_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_dataset_whose_weight_begins_at_a_step_may_be_the_one_that_is_left() -> None:
    blend = blended(SIZES, [1, 0, 0], changes_at_steps={2: [1, 1, 0]}, max_epochs=[1, None, None])
    sampler = CyclicSampler(blend, 4, shuffle=True, seed=1)
    assert np.bincount(datasets_of(sampler.order, sampler.order.locate(np.arange(20))[1])).tolist() == [10, 10]
    with pytest.raises(ConfigError, match="after 10 samples"):
        sampler.follow(StepSchedule(((0, 8),)))


def test_a_blend_is_no_concatenation() -> None:
    plain = CyclicSampler(range(60), 4, shuffle=True, seed=1)
    with pytest.raises(CheckpointError, match=r"was a blend of .* and is now no blend"):
        plain.load_state_dict(at(4, [1, 2, 3]).state_dict())


def test_one_round_over_a_blend_takes_every_sample_once() -> None:
    batches = list(SingleRoundSampler(blended(SIZES, [1, 0, 5]), 4, shuffle=True))
    assert sorted(index for batch in batches for index in batch) == list(range(60))


def test_the_state_of_a_blend_of_thirty_datasets_stays_small() -> None:
    sizes = [10**6 + number for number in range(30)]
    weights = [number + 0.5 for number in range(30)]
    phases = (0, proportions(weights)), (10**7, proportions(weights[::-1]))
    order = order_of(Blend(tuple(sizes), phases, (), (*(2 * size for size in sizes[1:]), None)))
    assert len(json.dumps({"position": 10**12, **order.to_json()})) < 1024


def test_a_map_of_a_blend_keeps_its_weights() -> None:
    blend = blended([40, 40], [3, 1])
    for dataset in (Map(blend, dict), RandomMap(Map(blend, dict), lambda sample, generator: sample)):
        order = CyclicSampler(dataset, 4).order
        assert order == CyclicSampler(blend, 4).order
        assert (order.locate(np.arange(40))[1] >= 40).sum() == 10


@pytest.mark.parametrize(
    "make",
    [
        lambda blend: ConcatDataset([blend, Numbers(3)]),
        lambda blend: BlendedDataset([blend, Numbers(3)], [1, 1]),
        lambda blend: Subset(blend, 0, 10),
        lambda blend: Map(random_split(Map(blend, dict), [1, 1])[0], dict),
        lambda blend: FilteredDataset(Subset(blend, [1, 2]), bool),
        lambda blend: Map(OneRound(FilteredDataset(blend, [True] * 80)), dict),
        lambda blend: InMemorySource(ConcatDataset([blend, Numbers(3)]), "a blend within"),
        lambda blend: Map(OneByOne(blend), dict),
        lambda blend: LabelledImages(blend),
    ],
)
def test_a_blend_within_a_part_or_another_blend_is_refused_by_a_stream(make: Any) -> None:
    dataset = make(blended([40, 40], [3, 1]))
    with pytest.raises(ConfigError, match=r"a (BlendedDataset|Map) is within a .* a stream would ignore its weights"):
        CyclicSampler(dataset, 4)
    if not isinstance(dataset, FilteredDataset):
        assert len(SingleRoundSampler(dataset, 1)) == len(dataset)


def test_a_limit_below_one_sample_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0.01 epochs of the 40 samples of dataset 1 are no sample"):
        blended([40, 40], [1, 1], max_epochs=[None, 0.01])


def test_a_shuffled_round_over_a_blend_tells_that_the_weights_have_no_effect(caplog: Any) -> None:
    blend = blended([4, 4], [3, 1])
    CyclicSampler(Map(blend, dict), 2, shuffle=True)
    SingleRoundSampler(blend, 2)
    assert not caplog.records
    SingleRoundSampler(Map(blend, dict), 2, shuffle=True)
    assert "A pass over a Map uses each sample once, whatever the weights of the blend" in caplog.text
