"""Filters and packers of one round: every unit once, in order; and filters under others."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data import DataLoader
from libai_data.data.datasets import (
    BlendedDataset,
    ConcatDataset,
    FilteredDataset,
    Map,
    OneRound,
    PackedDataset,
    RandomMap,
    Subset,
    random_split,
)
from libai_data.data.datasets.shard_lengths import shard_lengths_of
from libai_data.data.samplers import CyclicSampler, Order, SingleRoundSampler
from libai_data.errors import ConfigError
from libai_data.structures import batch_info
from tests.data.samplers.transforms import Documents, as_tokens, expected_packs, expected_windows, is_even

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@given(
    lengths=LENGTHS,
    units=st.integers(9, 12),
    window=st.sampled_from([None, 0, 1, 5, 64]),
    known=st.booleans(),
)
def test_one_round_of_packs_holds_every_token_once(
    lengths: list[int], units: int, window: int | None, known: bool
) -> None:
    known_lengths = lengths if known else None
    cut = window is None
    packs = OneRound(PackedDataset(Documents(lengths), units, cut=cut, lengths=known_lengths, window=window))
    found = [as_tokens(packs[index]) for index in range(len(packs))]
    tokens = [token[:2] for pack in found for token in pack if token is not None]
    every = [(index, place) for index, length in enumerate(lengths) for place in range(length)]
    order = Order(len(lengths), 0, False)
    if window:
        assert sorted(tokens) == every
        assert found == list(expected_windows(lengths, order, units, window, lambda index: True, len(lengths)))
        return
    assert tokens == every
    # But for what lies behind the end, packs are those of the endless stream.
    endless = expected_packs(lengths, order, units, cut, lambda index: True)
    for pack, expected in zip(found, endless if sum(lengths) else ()):
        there = list(takewhile(lambda token: token is not None, pack))
        assert expected[: len(there)] == there


def test_a_round_is_evaluated_sample_by_sample_on_any_number_of_ranks() -> None:
    kept = OneRound(FilteredDataset(Documents([3, 4, 5, 6, 8, 4, 2]), is_even))
    found = []
    for rank in range(2):
        loader = DataLoader(kept, SingleRoundSampler(kept, 2, False, rank, 2), collate_fn=list_lengths)
        found.append([(batch.n.tensor.tolist(), info.valid) for batch in loader if (info := batch_info(batch))])
    assert found == [[([4, 6], 4), ([2, 2], 1)], [([8, 4], 4), ([2, 2], 1)]]


def list_lengths(samples: Any) -> Any:
    """A batch of the lengths of documents."""
    return {"n": np.array([len(sample.labels.tensor) for sample in samples])}


@given(lengths=LENGTHS, bools=st.lists(st.booleans(), min_size=12, max_size=12))
def test_filters_may_lie_under_filters_and_packers(lengths: list[int], bools: list[bool]) -> None:
    lengths = [*lengths, 4]
    bools = [*bools[: len(lengths) - 1], True]
    documents = Documents(lengths)
    both = [keep and length % 2 == 0 for keep, length in zip(bools, lengths)]
    filters: list[Any] = [
        FilteredDataset(documents, both),
        FilteredDataset(FilteredDataset(documents, is_even), bools),
        FilteredDataset(FilteredDataset(documents, bools), is_even),
        FilteredDataset(FilteredDataset(documents, bools), [length % 2 == 0 for length in lengths]),
    ]
    streams = []
    for filtered in filters:
        packed = PackedDataset(filtered, 5, lengths=lengths)
        batch = CyclicSampler(packed, 6, shuffle=True, seed=1).batch_at(0)
        assert batch is not None
        streams.append([as_tokens(packed[start]) for start in batch.indices])
    assert all(stream == streams[0] for stream in streams)
    assert all(both[token[0]] for pack in streams[0] for token in pack)


def test_what_decides_a_round_is_in_its_fingerprint() -> None:
    prints = [
        OneRound(dataset).fingerprint()
        for dataset in (
            FilteredDataset(Documents([2, 4]), is_even),
            FilteredDataset(FilteredDataset(Documents([2, 4]), is_even), [True, True]),
            FilteredDataset(Documents([2, 4]), [True, False]),
            PackedDataset(Documents([2, 4]), 4),
            PackedDataset(Documents([2, 4]), 6),
        )
    ]
    assert len({str(each) for each in prints}) == len(prints)


@pytest.mark.parametrize(
    "use",
    [
        lambda transform: Map(transform, dict),
        lambda transform: RandomMap(transform, dict),
        lambda transform: Subset(transform, [0, 1]),
        lambda transform: Subset(transform, 0, 2),
        lambda transform: ConcatDataset([transform, transform]),
        lambda transform: BlendedDataset([transform, Documents([1])], weights=[1, 1]),
        lambda transform: random_split(transform, [0.5, 0.5]),
        lambda transform: DataLoader(transform, 2, sampler=[0, 1]),
        lambda transform: DataLoader(transform, batch_sampler=[[0, 1]]),
    ],
)
@pytest.mark.parametrize("kind", [lambda dataset: FilteredDataset(dataset, is_even), lambda d: PackedDataset(d, 4)])
def test_outputs_of_filters_and_packers_are_not_read_by_index(kind: Any, use: Any) -> None:
    """They took an index for a place of the order, if another loader had said in which order: some came twice."""
    transform = kind(Documents([1, 2, 3, 4]))
    DataLoader(transform, 2).close()
    with pytest.raises(ConfigError, match=r"no index of their own.*OneRound\("):
        use(transform)


def test_a_filter_that_changes_its_samples_is_not_taken_apart() -> None:
    class Doubling(FilteredDataset):
        def __getitem__(self, start: int) -> Any:
            return {"tokens": 2 * super().__getitem__(start)["tokens"]}

    changed = Doubling(Documents([2, 4]), is_even)
    for make in (lambda: FilteredDataset(changed, is_even), lambda: PackedDataset(changed, 4)):
        with pytest.raises(ConfigError, match="got a Doubling, whose samples have no index of their own"):
            make()


def test_lists_for_an_empty_dataset_may_be_empty() -> None:
    """Such as those of a validation part without samples: numpy makes floats of an empty list, which were refused."""
    packed = PackedDataset(FilteredDataset(Documents([]), []), 4, lengths=[], keep=np.array([]))
    assert len(OneRound(packed)) == len(Subset(Documents([]), np.array([]))) == 0
    shards, empty = Documents([1, 2, 3]), Documents([])
    shards.shard_lengths, empty.shard_lengths = [1, 2], []  # type: ignore[attr-defined]
    assert shard_lengths_of(ConcatDataset([shards, empty])).tolist() == [1, 2]


def test_another_seed_of_a_round_is_another_dataset() -> None:
    rounds = [OneRound(FilteredDataset(Documents([3, 4]), is_even), seed) for seed in (0, 1, 2, 1)]
    prints = [repr(each.fingerprint()) for each in rounds]
    assert len({*prints}) == 3 and prints[1] == prints[3]
