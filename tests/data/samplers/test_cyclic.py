from __future__ import annotations

import inspect
import json
import tracemalloc
from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai_data.data.samplers import CyclicSampler, SingleRoundSampler, StreamSampler
from libai_data.errors import CheckpointError, ConfigError
from tests.properties import examples

layouts = st.sampled_from([(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)])
"""(data-parallel size, micro batch) of a global batch of 12."""


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def ranks_of(size: int, data_parallel_size: int, micro_batch_size: int, **arguments: Any) -> list[CyclicSampler]:
    return [
        CyclicSampler(
            range(size),
            micro_batch_size,
            data_parallel_rank=rank,
            data_parallel_size=data_parallel_size,
            **{"shuffle": True, **arguments},
        )
        for rank in range(data_parallel_size)
    ]


def global_batches(ranks: list[CyclicSampler], count: int) -> list[list[int]]:
    """The next global batches: the ranks' parts one behind the other."""
    return [flat(parts) for parts in islice(zip(*ranks), count)]


def stream(size: int, count: int, **arguments: Any) -> list[int]:
    """The first `count` indices of a stream, as a single rank with batches of one sample takes them."""
    [sampler] = ranks_of(size, 1, 1, **arguments)
    return [index for [index] in islice(sampler, count)]


@settings(max_examples=examples(60))
@given(st.integers(1, 1500), st.integers(0, 2**32), st.integers(0, 5000), st.booleans(), st.booleans(), layouts)
def test_a_global_batch_does_not_depend_on_the_data_parallel_size(
    size: int, seed: int, consumed: int, shuffle: bool, drop_last: bool, layout: Any
) -> None:
    drop_last = drop_last and size >= 12
    arguments = {"seed": seed, "consumed_samples": consumed, "shuffle": shuffle, "drop_last": drop_last}
    expected = global_batches(ranks_of(size, 1, 12, **arguments), 5)
    assert global_batches(ranks_of(size, *layout, **arguments), 5) == expected


@settings(max_examples=examples(40))
@given(st.integers(1, 300), st.integers(0, 2**32), layouts)
def test_each_epoch_visits_each_index_once_across_the_borders_of_epochs(size: int, seed: int, layout: Any) -> None:
    batches = global_batches(ranks_of(size, *layout, seed=seed), 3 * size // 12 + 1)
    indices = flat(batches)
    for epoch in range(3):
        assert sorted(indices[epoch * size : (epoch + 1) * size]) == list(range(size))


@given(st.integers(1, 300), st.integers(0, 2000), st.booleans())
def test_consumed_samples_and_a_saved_state_lead_to_the_same_place(size: int, consumed: int, shuffle: bool) -> None:
    [expected] = ranks_of(size, 1, 12, consumed_samples=consumed, shuffle=shuffle)
    [set_later] = ranks_of(size, 1, 12, shuffle=shuffle)
    set_later.set_consumed_samples(consumed)
    [restored] = ranks_of(size, 1, 12, shuffle=shuffle)
    restored.load_state_dict(expected.state_dict())
    assert expected.consumed_samples == restored.consumed_samples == set_later.consumed_samples == consumed
    wanted = list(islice(expected, 3))
    assert list(islice(set_later, 3)) == list(islice(restored, 3)) == wanted
    assert flat(wanted) == stream(size, consumed + 36, shuffle=shuffle)[consumed:]


def test_set_epoch_goes_on_at_an_epochs_beginning() -> None:
    [sampler] = ranks_of(20, 1, 5)
    sampler.set_epoch(3)
    assert sampler.position == 60
    [sampler] = ranks_of(23, 1, 5, drop_last=True)
    sampler.set_epoch(3)
    assert sampler.position == 60


@given(st.integers(0, 400))
def test_a_batch_is_the_same_however_one_came_to_it(number: int) -> None:
    [fresh] = ranks_of(50, 1, 7)
    [used] = ranks_of(50, 1, 7)
    for position in (0, 7, 14, 3, 2100, number * 7 + 1):
        used.batch_at(position)
    batch = fresh.batch_at(number * 7)
    again = used.batch_at(number * 7)
    assert batch is not None
    assert again is not None
    assert (batch.step, batch.position, batch.size, batch.valid) == (number, number * 7, 7, 7)
    assert batch.epoch == batch.epochs[0]
    np.testing.assert_array_equal(batch.indices, again.indices)
    np.testing.assert_array_equal(batch.epochs, again.epochs)
    assert batch.epochs.tolist() == [(number * 7 + row) // 50 for row in range(7)]
    # All ranks say the same of a batch, also where an epoch ends within it.
    parts = [sampler.batch_at(number * 12) for sampler in ranks_of(31, 4, 3)]
    facts = {(part.step, part.epoch, part.position, part.size, part.valid) for part in parts if part is not None}
    assert facts == {(number, number * 12 // 31, number * 12, 12, 12)}


def test_a_huge_dataset_gives_its_first_batch_and_any_other_in_under_one_megabyte() -> None:
    tracemalloc.start()
    try:
        for position in (0, 7 * 10**9):
            sampler = CyclicSampler(range(10**9), 8, shuffle=True, consumed_samples=position)
            assert len(next(iter(sampler))) == 8
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("kind", "more"), [(CyclicSampler, {"consumed_samples": 0}), (SingleRoundSampler, {"drop_last": False})]
)
def test_the_signature_is_libais(kind: Any, more: dict[str, Any]) -> None:
    parameters = dict(list(inspect.signature(kind).parameters.items())[:7])
    required = dict.fromkeys(("dataset", "micro_batch_size"), inspect.Parameter.empty)
    own = {"shuffle": False, "data_parallel_rank": 0, "data_parallel_size": 1, "seed": 0}
    assert {name: each.default for name, each in parameters.items()} == {**required, **own, **more}
    assert isinstance(kind(range(5), 2), StreamSampler)


def test_a_length_is_that_of_the_dataset() -> None:
    assert len(CyclicSampler(range(5), 2)) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size is 0"),
        ({"micro_batch_size": 0, "drop_last": True}, "micro_batch_size is 0"),
        ({"micro_batch_size": -2}, "micro_batch_size is -2"),
        ({"micro_batch_size": "4"}, "micro_batch_size is '4'"),
        ({"micro_batch_size": None}, "micro_batch_size is None"),
        ({"micro_batch_size": 2.0}, r"micro_batch_size is 2\.0"),
        ({"micro_batch_size": True}, "micro_batch_size is True"),
        ({"data_parallel_size": 0}, "data_parallel_size is 0"),
        ({"data_parallel_rank": 2, "data_parallel_size": 2}, r"data_parallel_rank is 2.*0 to 1"),
        ({"data_parallel_rank": -1}, "data_parallel_rank is -1"),
        ({"consumed_samples": -1}, "consumed_samples is -1"),
        ({"consumed_samples": 1.5}, r"consumed_samples is 1\.5"),
        ({"seed": None}, "seed is None"),
        ({"dataset": range(0)}, "dataset is empty"),
        (
            {"micro_batch_size": 4, "data_parallel_size": 3, "drop_last": True},
            r"10 samples.*global batch of 12 \(micro_batch_size 4 x data_parallel_size 3\).*train_micro_batch_size",
        ),
    ],
)
def test_bad_arguments_are_refused_by_name_and_value(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CyclicSampler(**{"dataset": range(10), "micro_batch_size": 2, **arguments})


@pytest.mark.parametrize("samples", [-1, 0.5, None])
def test_impossible_places_are_refused(samples: Any) -> None:
    [sampler] = ranks_of(50, 1, 5)
    with pytest.raises(ConfigError, match="consumed_samples is"):
        sampler.set_consumed_samples(samples)
    with pytest.raises(ConfigError, match="epoch is"):
        sampler.set_epoch(samples)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 1}, "seed was 1 and is now 0"),
        ({"shuffle": False}, "shuffle was False and is now True"),
        ({"size": 51}, "samples was 51 and is now 50"),
        ({"drop_last": True, "micro_batch_size": 7}, "epoch_size was 49 and is now 50"),
    ],
)
def test_the_state_of_another_stream_is_refused_with_both_values(other: dict[str, Any], message: str) -> None:
    [sampler] = ranks_of(50, 1, 5)
    [saved] = ranks_of(**{"size": 50, "data_parallel_size": 1, "micro_batch_size": 5, **other})
    with pytest.raises(CheckpointError, match=message):
        sampler.load_state_dict(saved.state_dict())
    assert sampler.position == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": -5}, "position is -5"),
        ({"position": "5"}, "position is '5'"),
        ({"position": None}, "position is None"),
        ({"order_version": 2}, "order_version was 2 and is now 1"),
        ({"seed": None}, "seed is None; it must be an int"),
    ],
)
def test_a_broken_state_is_refused(change: dict[str, Any], message: str) -> None:
    [sampler] = ranks_of(50, 1, 5)
    with pytest.raises(CheckpointError, match=message):
        sampler.load_state_dict({**sampler.state_dict(), **change})
    with pytest.raises(CheckpointError, match=r"lacks .*'seed'"):
        sampler.load_state_dict({"position": 5})


def test_a_state_is_small_json_of_plain_numbers_even_from_numpys() -> None:
    sampler = CyclicSampler(
        range(100),
        np.int64(5),  # type: ignore[arg-type]
        consumed_samples=np.int64(10),  # type: ignore[arg-type]
        seed=np.int64(3),  # type: ignore[arg-type]
        data_parallel_rank=np.int64(1),  # type: ignore[arg-type]
        data_parallel_size=np.int64(2),  # type: ignore[arg-type]
    )
    next(iter(sampler))
    assert len(json.dumps(sampler.state_dict())) < 1024
    assert sampler.state_dict()["position"] == 20
