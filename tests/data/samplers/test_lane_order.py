"""The order in lanes: what a page of loops says it is, and what readers of contiguous rows gain by it."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections import Counter, OrderedDict
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai_data.data.datasets.blend import BlendedDataset
from libai_data.data.datasets.combine import ConcatDataset, Subset
from libai_data.data.datasets.mapped import Map
from libai_data.data.datasets.shard_lengths import shard_lengths_of
from libai_data.data.datasets.stream_transform import FilteredDataset
from libai_data.data.random.hashing import combine64, mix64_array
from libai_data.data.random.permutation import permuted, permuted_each, whole_permutations
from libai_data.data.samplers import CyclicSampler, Ledger, StepSchedule, StreamState, lane_visits
from libai_data.data.samplers.cursor import IndexBatch
from libai_data.data.samplers.lane_order import LaneOrder, lane_of_turn, laned_order
from libai_data.data.samplers.sampler import StreamSampler
from libai_data.data.samplers.weighted_order import WeightedOrder
from libai_data.errors import CheckpointError, ConfigError
from tests.properties import examples

some_lengths = st.lists(st.integers(0, 12), min_size=1, max_size=30).filter(any)


class Shards:
    """A dataset of shards of these lengths; a sample is its index."""

    def __init__(self, lengths: Any) -> None:
        self.shard_lengths = np.asarray(lengths)

    def __len__(self) -> int:
        return int(self.shard_lengths.sum())

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"index": np.array(index)}

    def shard_of(self, indices: np.ndarray) -> np.ndarray:
        return np.searchsorted(np.cumsum(self.shard_lengths), indices, side="right")


def order_of(lengths: Any, lanes: int, block: int = 4, seed: int = 0, shuffle: bool = True) -> LaneOrder:
    order = laned_order(Shards(lengths), seed, shuffle, lanes, block)
    assert order is not None
    return order


def batch_at(sampler: StreamSampler, position: int) -> IndexBatch:
    batch = sampler.batch_at(position)
    assert batch is not None
    return batch


def reversed_digits(turn: int, lanes: int) -> int:
    factor = next((number for number in range(2, lanes + 1) if lanes % number == 0), 1)
    rest = lanes // factor
    return 0 if lanes == 1 else turn % factor * rest + reversed_digits(turn // factor, rest)


def reference(lengths: list[int], lanes: int, block: int, seed: int, epoch_size: int, epochs: int) -> list[int]:
    """The indices at all places of some epochs, from loops over all samples."""
    group_size = lane_visits._GROUP

    def shuffled(items: list[Any], *what: int) -> list[Any]:
        return [items[number] for number in permuted(len(items), combine64(1, seed, *what), 0, np.arange(len(items)))]

    starts = np.cumsum([0, *lengths]).tolist()
    row = shuffled([shard for shard, length in enumerate(lengths) if length], 0)
    samples = [(shard, starts[shard] + number) for shard in row for number in range(lengths[shard])]
    stream: list[int] = []
    for epoch in range(epochs):
        places = range(epoch * epoch_size, epoch * epoch_size + len(samples))
        turns = Counter(reversed_digits(place % lanes, lanes) for place in places)
        rest, of_lane = iter(samples), {}
        for lane in range(lanes):
            own = [next(rest) for _ in range(turns[lane])]
            shards = [[index for of, index in own if of == shard] for shard in dict.fromkeys(of for of, _ in own)]
            count = -(-len(shards) // group_size)
            cuts = [len(shards) * number // count for number in range(count + 1)] if count else [0]
            groups = [(number, shards[low:high]) for number, (low, high) in enumerate(zip(cuts, cuts[1:]))]
            visited: list[int] = []
            for number, group in shuffled(groups, epoch, lane, 1):
                group = shuffled(group, epoch, lane, 2, number)
                blocks = -(-len(group) // block)
                bounds = [len(group) * each // blocks for each in range(blocks + 1)]
                for each, (low, high) in enumerate(zip(bounds, bounds[1:])):
                    together = [index for shard in group[low:high] for index in shard]
                    key = mix64_array(np.array([each + combine64(1, seed, epoch, lane, number) & 2**64 - 1], np.uint64))
                    size = np.full(len(together), len(together), np.uint64)
                    inner = permuted_each(size, np.repeat(key, len(together)), np.arange(len(together)))
                    visited += [together[place] for place in inner]
            of_lane[lane] = iter(visited)
        stream += [next(of_lane[reversed_digits(place % lanes, lanes)]) for place in places[:epoch_size]]
    return stream


@given(some_lengths, st.integers(1, 20), st.integers(1, 5), st.integers(-(2**63), 2**64), st.data())
def test_the_order_is_what_loops_over_all_samples_say(
    lengths: list[int], lanes: int, block: int, seed: int, data: st.DataObject
) -> None:
    epoch_size = data.draw(st.integers(1, sum(lengths)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane_visits, "_GROUP", data.draw(st.integers(1, 6)))
        order = LaneOrder(sum(lengths), seed, True, epoch_size, lanes, block, "", np.array(lengths))
        expected = reference(lengths, lanes, block, seed, epoch_size, 3)
        epochs, indices = order.locate(np.arange(3 * epoch_size))
        assert indices.tolist() == expected
        np.testing.assert_array_equal(epochs, np.repeat(np.arange(3), epoch_size))
        places = data.draw(st.lists(st.integers(0, 3 * epoch_size - 1), max_size=20))
        assert order.locate(np.array(places, dtype=np.int64))[1].tolist() == [expected[place] for place in places]
        for epoch in range(3):
            taken = expected[epoch * epoch_size : (epoch + 1) * epoch_size]
            assert len(set(taken)) == epoch_size, "a sample comes twice in an epoch"
        for index in range(order.size):
            _, used = order.uses_of(index, 0, 3 * epoch_size)
            assert used.tolist() == [place for place, other in enumerate(expected) if other == index]


def test_the_order_in_lanes_stays_the_same_in_all_versions() -> None:
    # Whoever changes this answer raises VISITS_VERSION: saved states would continue elsewhere.
    order = order_of(np.full(8 * 513, 3), 8, seed=7)  # each lane has one shard too many for two groups
    digest = hashlib.sha256(order.locate(np.arange(2 * order.size))[1].astype("<i8").tobytes())
    assert digest.hexdigest() == "f8e5b9618d42f0c584b5e58cbfaf9c835d27bdf7582a9d8096b1c3befd16d744"


@given(st.integers(1, 200), st.data())
def test_of_places_that_follow_each_other_each_part_of_the_lanes_has_the_same_share(
    lanes: int, data: st.DataObject
) -> None:
    lane = lane_of_turn(lanes)
    assert lane.tolist() == [reversed_digits(turn, lanes) for turn in range(lanes)]
    assert sorted(lane.tolist()) == list(range(lanes))
    readers, rest = 1, lanes
    while rest > 1 and data.draw(st.booleans()):
        factor = next(number for number in range(2, rest + 1) if rest % number == 0)
        readers, rest = readers * factor, rest // factor
    start, batch = data.draw(st.integers(0, 1000)), readers * data.draw(st.integers(1, 20))
    own = np.sort(lane[(start + np.arange(batch)) % lanes]) // (lanes // readers)
    np.testing.assert_array_equal(own, np.repeat(np.arange(readers), batch // readers))


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32), st.sampled_from([(8, 2), (8, 4), (12, 2), (12, 6), (16, 16)]), st.data())
def test_readers_share_no_shard_but_at_the_boundaries_of_their_spans(
    seed: int, shape: tuple[int, int], data: st.DataObject
) -> None:
    lanes, readers = shape
    lengths = np.random.default_rng(seed).integers(20, 60, 4 * lanes)
    dataset = Shards(lengths)
    # 6 is no product of the first factors of 12, which are 2, 2 and 3: then a batch must have whole rounds.
    micro = data.draw(st.integers(1, 5)) * (2 if shape == (12, 6) else 1)
    parts = [CyclicSampler(dataset, micro, True, 0, rank, readers, seed=1, lanes=lanes) for rank in range(readers)]
    batch_size = micro * readers
    for epoch in range(2):
        first, stop = -(-epoch * len(dataset) // batch_size), (epoch + 1) * len(dataset) // batch_size
        read = [
            set(dataset.shard_of(np.concatenate([batch_at(part, k * batch_size).indices for k in range(first, stop)])))
            for part in parts
        ]
        # An end of a span moves by less than `lanes` samples from epoch to epoch, and may so lie in two shards.
        assert sum(map(len, read)) <= len(set().union(*read)) + readers - 1
        for one in range(readers):
            for other in range(one + 1, readers):
                assert len(read[one] & read[other]) <= (other == one + 1)


@settings(max_examples=examples(60))
@given(some_lengths, st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.data())
def test_the_shards_that_rows_need_are_known_in_advance(
    lengths: list[int], lanes: int, block: int, parts: int, micro: int, data: st.DataObject
) -> None:
    dataset, order = Shards(lengths), order_of(lengths, lanes, block)
    batch_size, part = parts * micro, data.draw(st.integers(0, parts - 1))
    rows, first = range(part * micro, (part + 1) * micro), data.draw(st.integers(0, 20))
    last = first + 2 + 2 * len(dataset) // batch_size
    uses = list(takewhile(lambda use: use.first <= last, order.shard_uses(rows, batch_size, first)))
    assert [use.first for use in uses] == sorted(use.first for use in uses)
    announced = {(use.shard, batch) for use in uses for batch in range(use.first, use.last + 1)}
    needed = set()
    for batch in range(first, last + 1):
        places = order.in_rows(batch * batch_size + np.arange(batch_size)[None])[0, rows.start : rows.stop]
        needed |= {(shard, batch) for shard in dataset.shard_of(order.locate(places)[1]).tolist()}
    assert needed <= announced
    if lanes % parts == 0 and batch_size % lanes == 0:
        assert {shard for shard, _ in needed} >= {use.shard for use in uses if use.last <= last}


@settings(max_examples=examples(40))
@given(some_lengths, st.sampled_from([1, 3, 8]), st.sampled_from([1, 2, 4]), st.data())
def test_meshes_skips_and_resumes_change_no_sample(
    lengths: list[int], lanes: int, size: int, data: st.DataObject
) -> None:
    dataset: Any = Shards(lengths)
    if data.draw(st.booleans()):
        dataset = BlendedDataset([dataset, Shards(lengths[::-1])], [2, 1], changes_at_steps={7: [1, 3]})
    schedule, skips = StepSchedule(((0, 8), (5, 16))), ((2, 3),) if data.draw(st.booleans()) else ()

    def sampler(rank: int, ranks: int) -> StreamSampler:
        made = CyclicSampler(dataset, 8 // ranks, True, 0, rank, ranks, seed=2, lanes=lanes, block=2)
        made.follow(schedule, skips)
        return made

    whole, steps = sampler(0, 1), data.draw(st.integers(0, 12))
    state = whole.state_dict()
    state["position"] = schedule.position_of(steps)
    ledger = Ledger(StreamSampler.state.fget(whole))  # type: ignore[attr-defined]
    whole.load_state_dict(state)
    parts = [sampler(rank, size) for rank in range(size)]
    for part in parts:
        part.load_state_dict(state)
    for step in range(steps, steps + 4):
        batch = batch_at(whole, schedule.position_of(step))
        assert batch.size == schedule.size_of(step)
        together = [batch_at(part, batch.position).indices for part in parts]
        np.testing.assert_array_equal(np.concatenate(together), batch.indices)
        epochs, indices = ledger.samples_of(step)
        np.testing.assert_array_equal(indices, batch.indices)
        row = data.draw(st.integers(0, batch.size - 1))
        uses = [use for use in ledger.uses_of(int(indices[row]), step + 1) if use.step == step]
        assert (step, row, epochs[row]) in [(use.step, use.row, use.epoch) for use in uses]
    node = parts[0].serving(tuple(range(size)))
    np.testing.assert_array_equal(batch_at(node, batch.position).indices, batch.indices)


def test_the_state_stays_small_and_holds_what_decides_the_order() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 5000)
    sampler = CyclicSampler(Shards(lengths), 8, shuffle=True, lanes=64)
    state = sampler.state_dict()
    assert len(str(state)) < 500
    assert not StreamState.from_json(state).order.can_locate
    with pytest.raises(CheckpointError, match=r"only a digest of the shards' lengths"):
        StreamState.from_json(state).order.locate(np.arange(3))
    CyclicSampler(Shards(lengths), 4, shuffle=True, lanes=64).load_state_dict(state)
    for other in (
        CyclicSampler(Shards(lengths), 8, shuffle=True, lanes=32),
        CyclicSampler(Shards(lengths), 8, shuffle=True, lanes=64, block=3),
        CyclicSampler(Shards(lengths[::-1]), 8, shuffle=True, lanes=64),
        CyclicSampler(Shards(lengths), 8, shuffle=True),
    ):
        with pytest.raises(CheckpointError, match=r"the lanes were .*resume_override=\[lanes\]"):
            other.load_state_dict(state)
        other.load_state_dict(state, override=["lanes"])
        assert other.position == sampler.position
    with pytest.raises(CheckpointError, match=r"samples was .* and is now .*resume_override=\[dataset\]"):
        CyclicSampler(Shards(lengths[1:]), 8, shuffle=True, lanes=64).load_state_dict(state)


def test_a_million_shards_need_little_memory_and_any_step_is_found_at_once() -> None:
    lengths = np.random.default_rng(0).integers(5_000, 15_000, 1_000_000)
    dataset = Shards(lengths)
    tracemalloc.start()
    try:
        sampler = CyclicSampler(dataset, 256, shuffle=True, lanes=64)
        batch_at(sampler, 0)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
        before = tracemalloc.get_traced_memory()[0]
        for step in range(0, 10**8, 3 * 10**7):
            batch_at(sampler, step * 256)
        assert tracemalloc.get_traced_memory()[0] < before + (10 << 20)
    finally:
        tracemalloc.stop()


def test_the_tables_of_all_lanes_are_made_at_once() -> None:
    order = LaneOrder(64_000, 1, True, 0, 64, 4, "", np.full(6400, 10))
    with pytest.MonkeyPatch.context() as patch:
        made: list[int] = []
        whole = whole_permutations

        def noted(sizes: np.ndarray, keys: np.ndarray) -> np.ndarray:
            made.append(len(sizes))
            return whole(sizes, keys)

        patch.setattr(lane_visits, "whole_permutations", noted)
        order.locate(np.arange(64))
        assert made == [64, 64], "the groups and the shards of each lane"
        order.locate(np.arange(64, 640))
    assert made == [64, 64], "they are kept"


class ForgottenAtOnce(OrderedDict):
    """As if another thread had pushed out what this one has just put there."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


IN_LANES = LaneOrder(120, 1, True, 120, 4, 2, "", np.full(40, 3))
BY_WEIGHT = WeightedOrder(120, 1, True, 60, "", False, np.arange(120) / 119)


@pytest.mark.parametrize(
    ("order", "of"),
    [
        (IN_LANES, lambda order: (order, "_spans")),
        (IN_LANES, lambda order: (order._visits, "_tables")),
        (BY_WEIGHT, lambda order: (order, "_sorted")),
    ],
)
def test_what_another_thread_forgets_meanwhile_changes_no_sample(order: Any, of: Any) -> None:
    order, places = replace(order), np.arange(1200)
    expected = order.locate(places)[1].tolist()
    owner, name = of(order)
    owner.__dict__[name] = ForgottenAtOnce()
    assert order.locate(places)[1].tolist() == expected


def test_sources_and_datasets_of_datasets_know_their_shards() -> None:
    one, two = Shards([3, 0, 4]), Shards([5])
    assert shard_lengths_of(ConcatDataset([one, two])).tolist() == [3, 0, 4, 5]
    assert shard_lengths_of(Subset(ConcatDataset([one, two]), 2, 9)).tolist() == [1, 0, 4, 2]
    assert shard_lengths_of(Subset(ConcatDataset([one, two]), range(2, 9))).tolist() == [1, 0, 4, 2]
    assert shard_lengths_of(Map(one, lambda sample: sample)).tolist() == [3, 0, 4]


class OfFive(Shards):
    def __len__(self) -> int:
        return 5


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: CyclicSampler(OfFive([-1, 6]), 1, lanes=2), "at least 0"),
        (lambda: CyclicSampler(OfFive([2.5, 2.5]), 1, lanes=2), "must be ints"),
        (lambda: CyclicSampler(OfFive([4]), 1, lanes=2), "add up to 4"),
        (lambda: CyclicSampler(range(5), 1, lanes=4), r"the shards of a range are not known.*shard_lengths"),
        (lambda: CyclicSampler(Subset(Shards([5]), [1, 2]), 1, lanes=4), "the shards of a Subset are not known"),
        (lambda: CyclicSampler(Shards([5]), 1, lanes=0), "lanes is 0"),
        (lambda: CyclicSampler(Shards([5]), 1, lanes=4, block=0), "block is 0"),
        (lambda: CyclicSampler(Shards([5]), 1, block=4), "block is 4.*set lanes, too"),
        (lambda: CyclicSampler(Shards([5]), 1, lanes=4, weights=[1] * 5), "lanes is 4, but weights are given, too"),
        (lambda: CyclicSampler(Shards([0]), 1, lanes=4), "the dataset is empty"),
        (
            lambda: batch_at(CyclicSampler(FilteredDataset(Shards([4, 4]), [True] * 4 + [False] * 4), 2, lanes=2), 0),
            "FilteredDataset keeps none of the samples of one of the 2 lanes.* Use fewer lanes",
        ),
    ],
)
def test_what_cannot_be_read_in_lanes_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
