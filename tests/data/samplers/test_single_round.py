from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.data.samplers import IndexBatch, SingleRoundSampler
from libai_data.data.samplers.single_round import ShortEndSampler
from libai_data.errors import ConfigError

sizes = st.integers(1, 200)
ranks = st.integers(1, 5)
micro_batches = st.integers(1, 9)


def ranks_of(size: int, data_parallel_size: int, micro_batch_size: int, **arguments: Any) -> list[SingleRoundSampler]:
    return [
        SingleRoundSampler(
            range(size), micro_batch_size, data_parallel_rank=rank, data_parallel_size=data_parallel_size, **arguments
        )
        for rank in range(data_parallel_size)
    ]


def global_indices(batches: list[IndexBatch]) -> list[int]:
    """Rows of a global batch, from the ranks' parts."""
    return [index for batch in batches for index in batch.indices.tolist()]


@given(sizes, ranks, micro_batches, st.booleans(), st.integers(0, 2**32))
def test_each_sample_counts_exactly_once_and_padding_is_marked(
    size: int, data_parallel_size: int, micro_batch_size: int, shuffle: bool, seed: int
) -> None:
    samplers = ranks_of(size, data_parallel_size, micro_batch_size, shuffle=shuffle, seed=seed)
    counted: list[int] = []
    taken = [list(sampler.batches(0)) for sampler in samplers]
    assert {len(batches) for batches in taken} == {len(samplers[0])}
    for parts in zip(*taken):
        assert {len(part.indices) for part in parts} == {micro_batch_size}
        assert len({(part.step, part.epoch, part.position, part.size, part.valid) for part in parts}) == 1
        rows = global_indices(list(parts))
        assert len(rows) == parts[0].size == data_parallel_size * micro_batch_size
        counted += rows[: parts[0].valid]
        # What pads is a sample that exists, the last one of the round, and nothing else.
        assert set(rows[parts[0].valid :]) <= {rows[parts[0].valid - 1]}
    assert sorted(counted) == list(range(size))
    if not shuffle:
        assert counted == list(range(size))


@given(sizes, st.sampled_from([(2, 6), (3, 4), (4, 3), (12, 1)]), st.booleans())
def test_a_global_batch_does_not_depend_on_the_data_parallel_size(size: int, layout: Any, shuffle: bool) -> None:
    expected = [batch.indices.tolist() for batch in ranks_of(size, 1, 12, shuffle=shuffle, seed=4)[0].batches(0)]
    parts = zip(*(sampler.batches(0) for sampler in ranks_of(size, *layout, shuffle=shuffle, seed=4)))
    assert [global_indices(list(batch)) for batch in parts] == expected


@given(sizes, ranks, micro_batches)
def test_with_drop_last_only_whole_batches_come_and_nothing_pads(
    size: int, data_parallel_size: int, micro_batch_size: int
) -> None:
    whole = size // (data_parallel_size * micro_batch_size)
    if not whole:
        with pytest.raises(ConfigError, match=f"{size} samples.*global batch of"):
            ranks_of(size, data_parallel_size, micro_batch_size, drop_last=True)
        return
    samplers = ranks_of(size, data_parallel_size, micro_batch_size, drop_last=True)
    for sampler in samplers:
        batches = list(sampler.batches(0))
        assert len(batches) == len(sampler) == whole
        assert all(batch.valid == batch.size for batch in batches)
        assert {len(batch.indices) for batch in batches} == {micro_batch_size}


@pytest.mark.parametrize("drop_last", [False, True])
def test_each_pass_is_an_epoch_in_an_order_of_its_own_if_it_is_shuffled(drop_last: bool) -> None:
    [sampler] = ranks_of(10, 1, 4, shuffle=True, drop_last=drop_last)
    passes = [list(sampler) for _ in range(3)]
    assert len({str(each) for each in passes}) == 3
    sampler.set_epoch(1)
    assert list(sampler) == passes[1]
    assert all([len(batch) for batch in each] == [4] * (2 if drop_last else 3) for each in passes)
    [unshuffled] = ranks_of(10, 1, 4)
    assert list(unshuffled) == list(unshuffled) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 9, 9]]


@given(sizes, ranks, micro_batches, st.booleans())
def test_a_short_end_repeats_only_what_makes_equal_parts(
    size: int, data_parallel_size: int, micro_batch_size: int, shuffle: bool
) -> None:
    samplers = [
        ShortEndSampler(range(size), micro_batch_size, shuffle, rank, data_parallel_size)
        for rank in range(data_parallel_size)
    ]
    counted: list[int] = []
    for parts in zip(*(sampler.batches(0) for sampler in samplers)):
        rows = global_indices(list(parts))
        assert len(rows) == parts[0].size < parts[0].valid + data_parallel_size
        assert len({len(part.indices) for part in parts}) == 1
        counted += rows[: parts[0].valid]
    assert sorted(counted) == list(range(size))


@pytest.mark.parametrize("cut", range(6))
@pytest.mark.parametrize("after", [(1, 4), (2, 2), (1, 3), (3, 1)])
def test_a_state_saved_within_a_round_goes_on_under_other_batch_sizes_and_rank_counts(cut: int, after: Any) -> None:
    size = 21
    saved = ranks_of(size, 2, 2, shuffle=True, seed=9)
    counted = [index for parts in islice(zip(*saved), cut) for part in parts for index in part]
    state = json.loads(json.dumps(saved[1].state_dict()))
    resumed = ranks_of(size, *after, shuffle=True, seed=9)
    for sampler in resumed:
        sampler.load_state_dict(state)
    for parts in zip(*(sampler.batches(sampler.position) for sampler in resumed)):
        counted += global_indices(list(parts))[: parts[0].valid]
    assert sorted(counted) == list(range(size))
