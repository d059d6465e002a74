"""What a BatchLoader promises to whoever iterates over it, whoever reads; here the trainer's own thread does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from typing import Any

import oneflow as flow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai_data import DataLoader
from libai_data.data.random.sample_random import sample_generator
from libai_data.data.samplers import CyclicSampler, SingleRoundSampler
from libai_data.errors import ConfigError, SchemaError
from libai_data.loader import BatchLoader, trivial_batch_collator
from libai_data.structures import DistTensorData, Instance, batch_info
from tests.properties import examples


class Drawn:
    """Samples that tell their index and draw a number."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return Instance(
            index=DistTensorData(index, placement_idx=-1),
            drawn=DistTensorData(sample_generator().random(2), ["split_0", "split_1"]),
        )


def endless(size: int, micro_batch_size: int, ranks: int = 1, rank: int = 0, **arguments: Any) -> BatchLoader:
    sampler = CyclicSampler(
        Drawn(size), micro_batch_size, shuffle=True, data_parallel_rank=rank, data_parallel_size=ranks
    )
    return BatchLoader(sampler.dataset, sampler, **arguments)


def rows_of(batches: Sequence[Any]) -> list[Any]:
    """Index and drawn numbers of each row."""
    return [
        (int(index), *drawn)
        for batch in batches
        for index, drawn in zip(batch.index.tensor.numpy(), batch.drawn.tensor.numpy().tolist())
    ]


@settings(max_examples=examples(30))
@given(st.integers(12, 40), st.integers(0, 9), st.sampled_from([(1, 12), (2, 6), (3, 4), (4, 3)]))
def test_a_state_saved_after_any_batch_goes_on_bit_for_bit_on_other_ranks(size: int, cut: int, layout: Any) -> None:
    whole = rows_of(list(islice(endless(size, 6), cut + 4)))
    loader = endless(size, 6)
    rows_of(list(islice(loader, cut)))
    state = json.dumps(loader.state_dict())
    assert len(state) < 1024
    parts = []
    ranks, micro_batch_size = layout
    for rank in range(ranks):
        resumed = endless(size, micro_batch_size, ranks, rank)
        resumed.load_state_dict(json.loads(state))
        parts.append([rows_of([batch]) for batch in islice(resumed, 2)])
    found = [row for batch in zip(*parts) for part in batch for row in part]
    assert found == whole[cut * 6 :]


def test_random_transforms_draw_otherwise_in_each_epoch_and_under_each_seed() -> None:
    rows = rows_of(list(islice(endless(10, 5), 4)))
    assert len({row[1] for row in rows}) == 20
    assert {row[1] for row in rows}.isdisjoint(row[1] for row in rows_of(list(islice(endless(10, 5, seed=1), 4))))


def test_each_pass_is_an_epoch_with_draws_of_its_own_also_after_breaking_off() -> None:
    dataset = Drawn(10)
    loader = BatchLoader(dataset, SingleRoundSampler(dataset, 4))
    first = rows_of(list(loader))
    next(iter(loader))
    third = rows_of(list(loader))
    assert third != first and [row[0] for row in third] == [row[0] for row in first]
    for epoch, expected in ((0, first), (2, third)):
        loader.set_epoch(epoch)
        assert rows_of(list(loader)) == expected
    assert len(loader) == 3


def test_batches_are_tensors_with_the_samples_layouts() -> None:
    batch = next(iter(endless(8, 4)))
    assert isinstance(batch, Instance)
    assert isinstance(batch.index.tensor, flow.Tensor)
    assert not batch.index.tensor.is_global
    assert (batch.index.tensor.dtype, batch.drawn.tensor.dtype) == (flow.int64, flow.float64)
    assert (batch.drawn.sbp_list, batch.drawn.placement_idx) == (["split_0", "split_1"], 0)
    assert (batch.index.sbp_list, batch.index.placement_idx) == (["split_0", "broadcast"], -1)


def test_each_batch_tells_where_it_stands() -> None:
    infos = [batch_info(batch) for batch in islice(endless(8, 4), 3)]
    assert [(info.step, info.epoch, info.position, info.size, info.valid) for info in infos if info] == [
        (0, 0, 0, 4, 4),
        (1, 0, 4, 4, 4),
        (2, 1, 8, 4, 4),
    ]
    dataset = Drawn(5)
    assert [batch_info(batch).valid for batch in BatchLoader(dataset, SingleRoundSampler(dataset, 3))] == [3, 2]  # type: ignore[union-attr]


def test_lengths_are_batches_of_an_epoch_rounded_up() -> None:
    assert len(endless(10, 4)) == 3
    assert len(endless(10, 4, ranks=2)) == 2
    assert endless(10, 4, ranks=2).global_batch_size == 8
    assert BatchLoader(Drawn(6), [[3, 1], [5]]).global_batch_size is None


def test_the_trivial_collator_changes_nothing() -> None:
    collated = rows_of(list(islice(endless(10, 4, collate_fn=trivial_batch_collator), 4)))
    assert collated == rows_of(list(islice(endless(10, 4), 4)))
    by_hand = rows_of(list(islice(endless(10, 4, collate_fn=lambda samples: trivial_batch_collator(samples)), 4)))
    assert by_hand == collated
    with pytest.raises(SchemaError, match="sample 0 of the batch is a dict"):
        trivial_batch_collator([{"x": 1}])  # type: ignore[list-item]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_dataset_whose_length_changes_is_refused_at_the_next_epoch(shuffle: bool) -> None:
    samples = [{"x": index} for index in range(6)]
    loader = DataLoader(samples, 2, shuffle=shuffle)
    assert len(list(loader)) == 3
    samples.append({"x": 6})
    with pytest.raises(ConfigError, match="list had 6 samples when its loader was made, and has 7 now"):
        iter(loader)
