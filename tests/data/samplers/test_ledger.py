"""The ledger names the samples of any step, and the steps of any sample, as a replay would."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai_data.errors import CheckpointError
from libai_data.data.samplers import CyclicSampler, Ledger, Order, StepSchedule
from tests.properties import examples
from tests.data.samplers.step_runs import following, steps_from
from tests.data.samplers.test_schedule import schedules, skips


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 10**6), st.booleans(), st.floats(0.01, 1))
def test_find_is_the_inverse_of_locate(size: int, seed: int, epoch: int, shuffle: bool, share: float) -> None:
    order = Order(size, seed, shuffle, epoch_size=max(1, int(size * share)))
    positions = epoch * order.epoch_size + np.arange(order.epoch_size)
    epochs, indices = order.locate(positions)
    assert set(epochs.tolist()) == {epoch}
    np.testing.assert_array_equal(order.find(epoch, indices), positions)
    left_out = np.setdiff1d(np.arange(size), indices)
    assert (order.find(epoch, left_out) == -1).all()


@pytest.mark.parametrize("index", [-1, 50])
def test_a_sample_outside_the_dataset_is_refused(index: int) -> None:
    with pytest.raises(IndexError, match=f"{index}.* lies outside a dataset of 50"):
        Order(50).find(0, np.array([index]))


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
    with pytest.raises(CheckpointError, match="knows the place in the stream, but no steps"):
        Ledger(CyclicSampler(range(50), 5).state)
