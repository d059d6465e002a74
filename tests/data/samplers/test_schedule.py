"""Steps take the positions that the schedule gives them, whatever the mesh, and the ledger tells which."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai_data.data.samplers import CyclicSampler, Ledger, LeftOut, Order, StepSchedule
from libai_data.data.samplers.schedule import parse_sizes, parse_skips
from libai_data.errors import CheckpointError, ConfigError
from tests.data.samplers.step_runs import expected_steps, following, steps_from
from tests.properties import examples

ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda r: (r[0], r[0] + r[1])), max_size=5)
skips = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)).map(lambda r: (r[0], r[0] + r[1])), max_size=3)
later_sizes = st.dictionaries(st.integers(1, 12), st.sampled_from([4, 8, 12, 16, 24]), max_size=3)
# Ranks of the data axis, and batches a step of each size is cut into; all divide every size.
meshes = st.sampled_from([(1, {}), (2, {}), (4, {}), (1, {8: 2, 16: 4}), (2, {4: 2, 8: 4, 24: 3}), (4, {16: 2, 24: 3})])


@st.composite
def schedules(draw: Any) -> StepSchedule:
    first = draw(st.sampled_from([4, 8, 12]))
    return StepSchedule(((0, first), *sorted(draw(later_sizes).items())))


@given(ranges)
def test_positions_and_places_lead_to_each_other_past_what_is_left_out(left_out: Any) -> None:
    omitted = {place for first, end in left_out for place in range(first, end)}
    taken = [place for place in range(120) if place not in omitted]
    filter_ = LeftOut(tuple(left_out))
    assert filter_.places_of(np.arange(len(taken))).tolist() == taken
    expected = [taken.index(place) if place in taken else -1 for place in range(120)]
    assert filter_.positions_of(np.arange(120)).tolist() == expected
    assert [filter_.end_of(count) for count in range(1, len(taken))] == [place + 1 for place in taken[:-1]]
    assert [filter_.count_before(place) for place in range(120)] == [
        sum(o < place for o in omitted) for place in range(120)
    ]


@given(ranges)
def test_a_batch_of_a_shard_plan_is_reached_at_its_position_and_not_before(left_out: Any) -> None:
    sampler = CyclicSampler(range(100), 4)
    sampler.left_out = LeftOut(tuple(left_out))
    for batch in range(20):
        reached = [position for position in range(100) if (sampler.batch_of(position) or 0) >= batch]
        assert reached == [*range(sampler.position_of_batch(batch), 100)]


@pytest.mark.parametrize(
    "sizes", [8, None, (), "08", {0: 8}, (0, 8), ((0, 8.5),), ((0, "8"),), ((0.0, 8),), ((0, True),)]
)
def test_a_schedule_of_what_is_no_pair_of_ints_is_refused(sizes: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"the batch size schedule is .*; it must (be a list of \[first step, global|begin)"
    ):
        StepSchedule(sizes)


def test_a_schedule_takes_numbers_of_numpy_and_lists() -> None:
    number: Any = np.int64
    assert StepSchedule([[number(0), number(8)], (number(5), 16)]).sizes == ((0, 8), (5, 16))  # type: ignore[arg-type]


@given(schedules())
def test_each_position_belongs_to_the_one_step_that_takes_it(schedule: StepSchedule) -> None:
    position = 0
    for step in range(30):
        assert schedule.position_of(step) == position
        own = np.arange(position, position + schedule.size_of(step))
        assert set(schedule.steps_at(own).tolist()) == {step}
        position += schedule.size_of(step)


@settings(max_examples=examples(80))
@given(st.integers(24, 90), schedules(), skips, meshes)
def test_every_mesh_takes_the_samples_that_the_definition_names(
    size: int, schedule: StepSchedule, skipped: Any, mesh: Any
) -> None:
    data_parallel_size, counts = mesh
    ranks = following(size, schedule, tuple(skipped), data_parallel_size, counts)
    found = list(islice(steps_from(ranks, 0, counts), 16))
    assert found == expected_steps(ranks[0].order, schedule, tuple(skipped), 16)


def test_epochs_are_those_of_the_order_also_behind_a_skip() -> None:
    [sampler] = following(20, StepSchedule(((0, 4),)), ((1, 3),))
    batches = list(islice(sampler.batches(0), 8))
    assert [batch.epoch for batch in batches] == [0, 0, 1, 1, 1, 1, 1, 2]
    sampler.set_epoch(1)
    assert sampler.position == 8
    assert sampler.batch_at(sampler.position).epochs.tolist() == [1, 1, 1, 1]  # type: ignore[union-attr]


def test_without_several_sizes_drop_last_leaves_out_what_fills_no_step() -> None:
    micro = CyclicSampler(range(23), 4, drop_last=True)
    assert micro.order.epoch_size == 20
    micro.follow(StepSchedule(((0, 8),)), (), {8: 2})
    assert micro.order.epoch_size == 16
    with pytest.raises(ConfigError, match="drop_last=False"):
        micro.follow(StepSchedule(((0, 8), (3, 16))), (), {8: 2})


@pytest.mark.parametrize(
    ("schedule", "counts", "message"),
    [
        (StepSchedule(((0, 4), (3, 6))), {}, r"6 samples of a step \(from step 3 on\).*4 data-parallel"),
        (StepSchedule(((0, 4),)), {4: 2}, "into 2 batches for 4"),
    ],
)
def test_steps_that_cannot_be_cut_are_refused(schedule: StepSchedule, counts: Any, message: str) -> None:
    sampler = CyclicSampler(range(60), 1, data_parallel_size=4)
    with pytest.raises(ConfigError, match=message):
        sampler.follow(schedule, (), counts)


MALFORMED = [[[0]], [[0, 4, 5]], 7, [4], [["0", 4]], [[0, 4.0]], [[True, 4]]]
NO_SCHEDULES = [[[1, 4]], [[0, 4], [0, 8]], [[0, 4], [5, 8], [3, 2]], [[0, 0]], []]


@pytest.mark.parametrize(
    ("parse", "value"),
    [
        *((parse_sizes, value) for value in (*MALFORMED, *NO_SCHEDULES)),
        *((parse_skips, value) for value in (*MALFORMED, [[-1, 4]], [[5, 4]])),
    ],
)
def test_malformed_pairs_of_a_config_are_refused_by_key(parse: Any, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"train\.some_key (is|has)"):
        parse("train.some_key", value)


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 10**6), st.booleans(), st.floats(0.01, 1), st.data())
def test_uses_are_the_inverse_of_locate(
    size: int, seed: int, epoch: int, shuffle: bool, share: float, data: st.DataObject
) -> None:
    order = Order(size, seed, shuffle, epoch_size=max(1, int(size * share)))
    first, end = epoch * order.epoch_size, (epoch + 1) * order.epoch_size
    epochs, indices = order.locate(np.arange(first, end))
    assert set(epochs.tolist()) == {epoch}
    for index in data.draw(st.lists(st.integers(0, size - 1), max_size=20)):
        found = np.stack(order.uses_of(index, first, end), axis=1).tolist()
        assert found == [[epoch, first + offset] for offset in np.flatnonzero(indices == index).tolist()]


@pytest.mark.parametrize("index", [-1, 50])
def test_a_sample_outside_the_dataset_is_refused(index: int) -> None:
    with pytest.raises(IndexError, match=f"{index}.* is outside a dataset of 50"):
        Order(50).uses_of(index, 0, 50)


@settings(max_examples=examples(40))
@given(st.integers(24, 90), schedules(), skips)
def test_the_ledger_says_what_a_replay_finds(size: int, schedule: StepSchedule, skipped: Any) -> None:
    ranks = following(size, schedule, tuple(skipped))
    ledger = Ledger(ranks[0].state)
    replayed = list(islice(steps_from(ranks, 0), 14))
    for step, samples in enumerate(replayed):
        epochs, indices = ledger.samples_of(step)
        assert list(zip(epochs.tolist(), indices.tolist())) == samples
    for index in (0, size // 2, size - 1):
        found = [(use.step, use.row, use.epoch) for use in ledger.uses_of(index, 14)]
        assert found == [
            (step, row, epoch)
            for step, samples in enumerate(replayed)
            for row, (epoch, other) in enumerate(samples)
            if other == index
        ]


def test_a_huge_dataset_is_answered_at_once() -> None:
    sampler = CyclicSampler(range(10**9), 512, shuffle=True, seed=3)
    sampler.follow(StepSchedule(((0, 512),)))
    ledger = Ledger(sampler.state)
    start = time.process_time()
    _, indices = ledger.samples_of(10**6)
    [use] = ledger.uses_of(int(indices[77]), 10**6 + 1)
    assert (use.step, use.row) == (10**6, 77)
    assert time.process_time() - start < 1


def test_a_state_without_steps_is_refused() -> None:
    with pytest.raises(CheckpointError, match="has the place in the stream, but no steps"):
        Ledger(CyclicSampler(range(50), 5).state)
