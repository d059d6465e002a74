"""A blend in lanes: what a loop over all places says it is, and which shards its readers need."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai_data.data.datasets import Blend, BlendedDataset
from libai_data.data.datasets.blend import proportions
from libai_data.data.random.hashing import combine64, mix64_array
from libai_data.data.samplers import CyclicSampler, LaneOrder, StreamState
from libai_data.data.samplers.blend_order import BlendOrder, LanedBlendOrder
from libai_data.data.samplers.blend_turns import phases_of, turns_of
from libai_data.data.samplers.lane_order import lane_of_turn
from tests.data.samplers.test_lane_order import Shards
from tests.properties import examples

LENGTH = 400


@st.composite
def laned_blends(draw: st.DrawFn) -> tuple[LanedBlendOrder, list[list[int]]]:
    """An order, and the lengths of the shards of each dataset."""
    some_lengths = st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any)
    shards = draw(st.lists(some_lengths, min_size=1, max_size=4))
    weights = st.lists(st.integers(0, 30), min_size=len(shards), max_size=len(shards))
    starts = [0, *sorted(draw(st.sets(st.integers(1, LENGTH), max_size=2)))]
    # The first dataset is never used up.
    phases = tuple((start, proportions([1 + counts[0], *counts[1:]])) for start in starts for counts in [draw(weights)])
    limits: tuple[Any, ...] = ()
    if draw(st.booleans()):
        limits = (None, *(draw(st.one_of(st.none(), st.integers(0, 90))) for _ in shards[1:]))
    blend = Blend(tuple(map(sum, shards)), phases, (), limits)
    lengths = np.concatenate([np.array(each) for each in shards])
    lanes, block, seed = draw(st.integers(1, 12)), draw(st.integers(1, 3)), draw(st.integers(0, 2**40))
    order = LanedBlendOrder(sum(blend.sizes), seed, draw(st.booleans()), 0, lanes, block, "", lengths, blend)
    return order, shards


def turns_in_loops(order: LanedBlendOrder, length: int) -> list[tuple[int, int, int]]:
    """At each place: the dataset, the lane's residue, and how many samples of the dataset the lane had before."""
    lanes = lane_of_turn(order.lanes)
    moved = (mix64_array(lanes.astype(np.uint64)) >> np.uint64(48)).tolist()
    taken: Counter[tuple[int, int]] = Counter()
    turns = []
    phases = phases_of(order.blend)
    for place in range(length):
        residue = place % order.lanes
        start, counts = phases.before(place + 1)[-1]
        period = sum(counts)
        shift = ((int(lanes[residue]) << 16) + moved[residue]) * period // (order.lanes << 16)
        rounds = len(range(residue, place, order.lanes)) - len(range(residue, start, order.lanes))
        dataset = int(turns_of(counts).datasets[(shift + rounds) % period])
        turns.append((dataset, residue, taken[dataset, residue]))
        taken[dataset, residue] += 1
    return turns


@pytest.mark.parametrize(
    ("lanes", "digest"),
    [
        (None, "1d4acb5c41bb02fcbaed4b6a6d3aba33dba928ef8d4b720175a95ee13687a239"),
        (8, "3800daa46cb5eb215859a49fa95ee1d382d4a1c24ad3f246d3cacad70f961828"),
    ],
)
def test_the_order_of_a_blend_stays_the_same_in_all_versions(lanes: int | None, digest: str) -> None:
    # Whoever changes this answer raises ORDER_VERSION and VISITS_VERSION: saved states would continue elsewhere.
    blend = Blend((24, 12, 30), ((0, (3, 3, 1)), (100, (5, 2, 2))), (), (None, None, 40))
    order = BlendOrder(66, 7, True, blend=blend)
    if lanes:
        order = LanedBlendOrder(66, 7, True, 0, lanes, 2, "", np.full(22, 3), blend)
    found = hashlib.sha256(np.stack(order.locate(np.arange(LENGTH))).astype("<i8").tobytes())
    assert found.hexdigest() == digest


@given(laned_blends(), st.data())
def test_each_lane_blends_its_spans_as_a_loop_over_all_places_does(
    made: tuple[LanedBlendOrder, list[list[int]]], data: st.DataObject
) -> None:
    order, shards = made
    turns = turns_in_loops(order, LENGTH)
    epochs, indices = order.locate(np.arange(LENGTH))
    firsts = np.cumsum([0, *order.blend.sizes])
    members = [
        LaneOrder(
            sum(own), combine64(order.seed, number), order.shuffle, 0, order.lanes, order.block, "", np.array(own)
        )
        for number, own in enumerate(shards)
    ]
    for number, member in enumerate(members):
        rows = [place for place, turn in enumerate(turns) if turn[0] == number]
        own = np.array([before * order.lanes + residue for _, residue, before in turns], dtype=np.int64)[rows]
        expected = member.locate(own)
        np.testing.assert_array_equal(epochs[rows], expected[0])
        np.testing.assert_array_equal(indices[rows], firsts[number] + expected[1])
    assert len(set(zip(epochs.tolist(), indices.tolist()))) == LENGTH, "a sample comes twice in an epoch"
    places = np.array(data.draw(st.lists(st.integers(0, LENGTH - 1), min_size=1, max_size=9)))
    np.testing.assert_array_equal(order.locate(places), (epochs[places], indices[places]))
    index = int(indices[places[0]])
    first, end = sorted(data.draw(st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH))))
    used = [place for place in range(first, end) if indices[place] == index]
    np.testing.assert_array_equal(np.stack(order.uses_of(index, first, end)), np.stack([epochs[used], np.array(used)]))
    taken = Counter(dataset for dataset, _, _ in turns[:first])
    assert order.taken_before(first) == tuple(taken[number] for number in range(len(shards)))


@settings(max_examples=examples(60))
@given(laned_blends())
def test_in_each_lane_each_dataset_is_less_than_two_samples_from_its_share(
    made: tuple[LanedBlendOrder, list[list[int]]],
) -> None:
    order, _ = made
    phases = phases_of(order.blend).phases
    for (start, counts), end in zip(phases, [*(start for start, _ in phases[1:]), phases[-1][0] + LENGTH]):
        places = np.arange(start, end)
        datasets = np.searchsorted(np.cumsum(order.blend.sizes), order.locate(places)[1], side="right")
        for residue in range(order.lanes):
            own = datasets[places % order.lanes == residue]
            taken = np.cumsum(own[:, None] == np.arange(len(counts)), axis=0)
            wanted = np.arange(1, len(own) + 1)[:, None] * np.array(counts)
            assert (np.abs(taken * sum(counts) - wanted) < 2 * sum(counts)).all()


@settings(max_examples=examples(30))
@given(laned_blends(), st.integers(1, 4), st.integers(1, 6), st.data())
def test_the_shards_that_rows_of_a_blend_need_are_known_in_advance(
    made: tuple[LanedBlendOrder, list[list[int]]], parts: int, micro: int, data: st.DataObject
) -> None:
    order, shards = made
    batch_size, part, first = parts * micro, data.draw(st.integers(0, parts - 1)), data.draw(st.integers(0, 20))
    rows, last = range(part * micro, (part + 1) * micro), first + LENGTH // batch_size
    uses = list(takewhile(lambda use: use.first <= last, order.shard_uses(rows, batch_size, first)))
    assert [use.first for use in uses] == sorted(use.first for use in uses)
    announced = {(use.shard, batch) for use in uses for batch in range(use.first, use.last + 1)}
    ends = np.cumsum(np.concatenate([np.array(each) for each in shards]))
    needed = set()
    for batch in range(first, last + 1):
        places = order.in_rows(batch * batch_size + np.arange(batch_size)[None])[0, rows.start : rows.stop]
        shards_read = np.searchsorted(ends, order.locate(places)[1], side="right").tolist()
        needed |= {(shard, batch) for shard in shards_read}
    assert needed <= announced
    if order.lanes % parts == 0 and batch_size % order.lanes == 0:
        # A dataset that ends may leave a block before its last shard, and so may a beginning within a block: there, the
        # use is another one than if all batches are read.
        all_read = set(takewhile(lambda use: use.first <= last, order.shard_uses(rows, batch_size)))
        limits, weights = order.blend.limits or (None,) * len(shards), order.blend.phases[-1][1]
        endless = [number for number in range(len(shards)) if weights[number] and limits[number] is None]
        numbers = np.repeat(np.arange(len(shards)), [len(each) for each in shards])
        whole = {use.shard for use in all_read & {*uses} if use.last <= last and numbers[use.shard] in endless}
        assert {shard for shard, _ in needed} >= whole
    of_all = list(takewhile(lambda use: use.first <= last, order.shard_uses(range(batch_size), batch_size)))
    for shard, batch in list(needed)[:5]:
        again = order.next_use(shard, batch_size, batch)
        assert again > batch
        later = [use.first for use in of_all if use.shard == shard and use.first > batch]
        assert again == min(later) if later else again > last


def test_a_state_of_a_blend_in_lanes_is_small_and_holds_what_decides_the_order() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 5000)
    datasets = [Shards(lengths), Shards(lengths[:70])]

    def sampler(weights: Any, **options: Any) -> CyclicSampler:
        return CyclicSampler(BlendedDataset(datasets, weights), 8, shuffle=True, lanes=64, **options)

    one = sampler([2, 1], consumed_samples=10**9)
    state = json.loads(json.dumps(one.state_dict()))
    assert len(json.dumps(state)) < 500
    assert StreamState.from_json(state).order == one.order
    assert not StreamState.from_json(state).order.can_locate
    other = sampler([1, 1])
    other.load_state_dict(state, ["weights"])
    assert isinstance(one.order, LanedBlendOrder) and isinstance(other.order, LanedBlendOrder)
    for number in range(2):
        # A lane continues where it was, whatever the weights are.
        before, after = (order._taken_in_lanes(number, 10**9) for order in (one.order, other.order))
        np.testing.assert_array_equal(before, after)
    shares = [
        np.diff([order.taken_before(place)[1] for place in (10**9, 2 * 10**9)]) for order in (one.order, other.order)
    ]
    np.testing.assert_allclose(np.ravel(shares), [10**9 / 3, 10**9 / 2], atol=2 * 64)
