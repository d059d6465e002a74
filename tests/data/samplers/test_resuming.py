"""A stream cut anywhere goes on as if it had not been; what differs is refused, or reconciled when told so."""

from __future__ import annotations

import json
import logging
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai_data.data.samplers import CyclicSampler, Ledger, StepSchedule
from libai_data.data.samplers.schedule import Ranges
from libai_data.errors import CheckpointError, ConfigError
from tests.data.samplers.step_runs import following, steps_from
from tests.data.samplers.test_schedule import meshes, schedules, skips
from tests.properties import examples

PLAIN = StepSchedule(((0, 8),))


def state_after(steps: int, sampler: CyclicSampler) -> dict[str, Any]:
    """The state behind so many steps, as a checkpoint has it."""
    list(islice(steps_from([sampler], 0), steps))
    state: dict[str, Any] = json.loads(json.dumps(sampler.state_dict()))
    return state


def plain(size: int = 50, schedule: StepSchedule = PLAIN, skipped: Ranges = (), **arguments: Any) -> CyclicSampler:
    [sampler] = following(size, schedule, skipped, **arguments)
    return sampler


@settings(max_examples=examples(30))
@given(st.integers(24, 60), schedules(), skips, meshes, meshes)
def test_every_cut_point_goes_on_as_the_uncut_run_on_any_mesh(
    size: int, schedule: StepSchedule, skipped: Any, before: Any, after: Any
) -> None:
    skipped = tuple(skipped)
    uncut = list(islice(steps_from(following(size, schedule, skipped, *before), 0, before[1]), 16))
    first = following(size, schedule, skipped, *before)
    states = [first[0].state_dict()]
    for _ in islice(steps_from(first, 0, before[1]), 13):
        states.append(json.loads(json.dumps(first[0].state_dict())))
    for cut, state in enumerate(states):
        resumed = following(size, schedule, skipped, *after)
        for rank in resumed:
            rank.load_state_dict(state)
        assert resumed[0].state_dict() == state
        assert list(islice(steps_from(resumed, cut, after[1]), 3)) == uncut[cut : cut + 3]


@given(st.integers(24, 60), schedules(), st.integers(0, 12), st.sampled_from([4, 8, 16, 24]))
def test_another_batch_size_from_any_step_on_loses_nothing_and_stays_in_the_ledger(
    size: int, schedule: StepSchedule, cut: int, new_size: int
) -> None:
    before = plain(size, schedule)
    taken = list(islice(steps_from([before], 0), cut))
    after = plain(size, StepSchedule(((0, new_size),)))
    after.load_state_dict(before.state_dict(), override=["global_batch_size"])
    taken += islice(steps_from([after], cut), 5)
    samples = [sample for step in taken for sample in step]
    epochs, indices = after.order.locate(np.arange(len(samples)))
    assert samples == list(zip(epochs.tolist(), indices.tolist()))
    ledger = Ledger(after.state)
    assert [list(zip(*(part.tolist() for part in ledger.samples_of(step)))) for step in range(cut + 5)] == taken


def test_a_changed_batch_size_is_refused_with_both_values_and_once_allowed_needs_no_word_again() -> None:
    state = state_after(5, plain())
    with pytest.raises(CheckpointError, match=r"global_batch_size was 8 and is now 16, after 5 steps.*\[global_batch"):
        plain(schedule=StepSchedule(((0, 16),))).load_state_dict(state)
    resumed = plain(schedule=StepSchedule(((0, 16),)))
    resumed.load_state_dict(state, override=["global_batch_size"])
    again = plain(schedule=StepSchedule(((0, 16),)))
    again.load_state_dict(resumed.state_dict())
    assert again.state == resumed.state
    assert again.schedule == StepSchedule(((0, 8), (5, 16)))


def test_a_schedule_that_is_true_of_the_past_may_change_what_comes(caplog: Any) -> None:
    state = state_after(5, plain())
    with caplog.at_level(logging.WARNING):
        plain(schedule=StepSchedule(((0, 8), (7, 16)))).load_state_dict(state)
    assert "8, 16 from step 7 on. The stream continues at position 40, so no sample is repeated" in caplog.text
    with pytest.raises(CheckpointError, match="8 and is now 8, 16 from step 3 on, after 5 steps"):
        plain(schedule=StepSchedule(((0, 8), (3, 16)))).load_state_dict(state)


def test_an_unchanged_run_resumes_without_a_word(caplog: Any) -> None:
    skipped = ((2, 3), (6, 7))
    with caplog.at_level(logging.INFO):
        plain(skipped=skipped).load_state_dict(state_after(4, plain(skipped=skipped)))
    assert not caplog.text


@pytest.mark.parametrize("cut", range(9))
def test_a_skip_named_only_at_the_resume_leaves_out_what_is_still_to_come(cut: int, caplog: Any) -> None:
    uncut = list(islice(steps_from([plain(200)], 0), 14))
    resumed = plain(200, skipped=((3, 6),))
    with caplog.at_level(logging.WARNING):
        resumed.load_state_dict(state_after(cut, plain(200)))
    # In the middle of the skip, the steps that are done cannot be undone.
    remaining = [step for number, step in enumerate(uncut) if number >= cut and not 3 <= number <= 6]
    assert list(islice(steps_from([resumed], cut), 4)) == remaining[:4]
    left_out = max(0, 7 - max(cut, 3)) * 8
    assert (f"leaves out {left_out} samples more" in caplog.text) == bool(left_out)
    later = plain(200)
    later.load_state_dict(resumed.state_dict())
    assert later.left_out == resumed.left_out, "the state remembers a skip that the config has forgotten"


def test_a_loader_without_a_schedule_keeps_what_the_state_leaves_out() -> None:
    skipped = plain(200, skipped=((3, 6),))
    state = state_after(1, skipped)
    bare = CyclicSampler(range(200), 8, True, seed=5)
    bare.load_state_dict(state)
    assert [batch.indices.tolist() for batch in islice(bare.batches(bare.position), 9)] == [
        batch.indices.tolist() for batch in islice(skipped.batches(skipped.position), 9)
    ]


def test_another_seed_in_the_middle_of_an_epoch_says_that_samples_are_repeated_in_it_alone(caplog: Any) -> None:
    before = plain(48)
    list(islice(steps_from([before], 0), 2))
    after = plain(48, seed=6)
    with caplog.at_level(logging.WARNING):
        after.load_state_dict(before.state_dict(), override=["seed"])
    list(islice(steps_from([after], 2), 4))
    assert "epoch 0 after 16 of its 48 samples. Some samples are used twice in this epoch" in caplog.text
    following_epoch = [index for step in islice(steps_from([after], 6), 6) for _, index in step]
    assert sorted(following_epoch) == list(range(48))


def test_at_the_beginning_of_an_epoch_another_seed_repeats_nothing(caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        plain(48, seed=6).load_state_dict(state_after(6, plain(48)), override=["seed"])
    assert "nothing is repeated and nothing left out" in caplog.text


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_dataset_of_another_length_goes_on_at_the_same_share_of_its_epoch(shuffle: bool, caplog: Any) -> None:
    def sampler(size: int) -> CyclicSampler:
        made = CyclicSampler(range(size), 8, shuffle, seed=5)
        made.follow(PLAIN)
        return made

    # Sequences of twice the length: half as many.
    after = sampler(48)
    with caplog.at_level(logging.WARNING):
        after.load_state_dict(state_after(15, sampler(96)), override=["dataset"])
    assert after.position == 48 + 12
    assert "samples was 96 and is now 48" in caplog.text
    assert ("nothing is repeated" in caplog.text) != shuffle
    assert ("Some samples are used twice in this epoch" in caplog.text) == shuffle
    assert after.state.step == 15
    with pytest.raises(CheckpointError, match="begins with step 15"):
        Ledger(after.state).samples_of(14)
    assert len(Ledger(after.state).samples_of(15)[0]) == 8
    # The next resume is one like any other.
    again = sampler(48)
    again.load_state_dict(after.state_dict())
    assert again.state == after.state


@pytest.mark.parametrize("name", ["seeds", "batch", "", "restart_data"])
def test_an_unknown_override_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="resume_override names") as refused:
        plain().load_state_dict(state_after(1, plain()), override=[name])
    assert f"Did you mean {name!r}" not in str(refused.value)


@pytest.mark.parametrize("override", ["seed", None, 3])
def test_overrides_that_are_no_list_of_names_are_refused(override: Any) -> None:
    with pytest.raises(ConfigError, match=r"it must be a list of names, such as \['seed'\]"):
        plain().load_state_dict(state_after(1, plain()), override=override)


def test_everything_that_differs_is_named_at_once_with_what_would_allow_it() -> None:
    with pytest.raises(CheckpointError) as caught:
        plain(60, seed=9).load_state_dict(state_after(2, plain(50)))
    message = str(caught.value)
    assert "seed was 5 and is now 9" in message
    assert "samples was 50 and is now 60" in message
    assert "train.resume_override=[seed,dataset]" in message
    assert "load_state_dict(state, override=['seed', 'dataset'])" in message


@pytest.mark.parametrize(
    "change", [{"batch_sizes": []}, {"batch_sizes": [[0]]}, {"batch_sizes": 8}, {"left_out": [[5, 1]]}, {"left_out": 3}]
)
def test_a_broken_schedule_in_a_state_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=f"is broken|data state's {next(iter(change))} is"):
        plain().load_state_dict({**state_after(2, plain()), **change})


def test_a_state_of_an_older_version_without_steps_goes_on() -> None:
    state = {
        key: value for key, value in state_after(5, plain()).items() if key not in ("batch_sizes", "first_position")
    }
    resumed = plain()
    resumed.load_state_dict(state)
    assert resumed.state.step == 5


def test_a_dataset_of_one_sample_is_taken_step_by_step_and_resumed() -> None:
    one = CyclicSampler(range(1), 1, True)
    one.follow(StepSchedule(((0, 1),)))
    assert list(islice(steps_from([one], 0), 3)) == [[(0, 0)], [(1, 0)], [(2, 0)]]
    resumed = CyclicSampler(range(1), 1, True)
    resumed.follow(StepSchedule(((0, 1),)))
    resumed.load_state_dict(one.state_dict())
    assert next(steps_from([resumed], 3)) == [(3, 0)]


def test_a_sampler_that_was_used_takes_over_what_a_state_leaves_out() -> None:
    skipped = plain(200, skipped=((3, 6),))
    state = {**skipped.state_dict(), "position": 16}
    used = plain(200)
    before = list(islice(steps_from([used], 0), 6))
    used.load_state_dict(state)
    assert list(islice(steps_from([used], 2), 1)) == [before[2]]
    assert next(steps_from([used], 3)) == next(steps_from([skipped_from(24)], 3)) != before[3]


def skipped_from(position: int) -> CyclicSampler:
    sampler = plain(200, skipped=((3, 6),))
    sampler.position = position
    return sampler
