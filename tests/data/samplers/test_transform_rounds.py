"""Finite passes over filters and packers: each sample once an epoch, without a scan, resumed exactly on any mesh."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai_data import DataLoader
from libai_data.data.datasets import BlendedDataset, FilteredDataset, OneRound, PackedDataset
from libai_data.data.samplers.transform_rounds import TransformRounds
from libai_data.errors import CheckpointError, ConfigError
from tests.data.samplers.test_transforms import Case, cases
from tests.data.samplers.transforms import Documents, as_tokens, is_even
from tests.properties import examples

ENDS = ("short", "pad", "drop")


class Ordered:
    """The samples of a dataset in a given order, with the numbers that they have there."""

    def __init__(self, dataset: Any, order: list[int]) -> None:
        self.dataset, self.order = dataset, order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.order[index]]


def sampler_of(case: Case, micro: int, rank: int = 0, ranks: int = 1, ends: str = "short") -> TransformRounds:
    return TransformRounds(case.dataset(), micro, True, rank, ranks, 1, ends)


def expected(case: Case, epoch: int) -> list[Any]:
    """The outputs of an epoch: those of one round over the samples in the order of that epoch."""
    order = sampler_of(case, 1).order
    indices = order.locate(epoch * order.size + np.arange(order.size))[1].tolist()
    whole = case.dataset()
    keep = None if case.keep is None else is_even
    packed = PackedDataset(Ordered(whole.dataset, indices), case.units, cut=case.cut, keep=keep, window=case.window)
    return [as_tokens(sample) for sample in map(OneRound(packed).__getitem__, range(len(OneRound(packed))))]


@settings(max_examples=examples(60), deadline=None)
@given(
    cases(), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.sampled_from(["short", "pad", "drop"]), st.integers(0, 8)
)
def test_each_epoch_has_the_outputs_of_a_round_on_every_mesh_and_after_every_cut(
    case: Case, ranks: int, micro: int, ends: str, cut: int
) -> None:
    wanted = [expected(case, epoch) for epoch in range(2)]
    kept = [len(outputs) // (ranks * micro) * ranks * micro if ends == "drop" else len(outputs) for outputs in wanted]
    samplers = [sampler_of(case, micro, rank, ranks, ends) for rank in range(ranks)]

    def taken(samplers: list[TransformRounds], batches: int | None = None) -> list[Any]:
        found: list[Any] = []
        cursors = [sampler.next_pass() for sampler in samplers]
        for sampler, cursor in zip(samplers, cursors):
            sampler.cursor = cursor
        for parts in islice(zip(*(each.batches(each.position) for each in samplers)), batches):
            assert len({(part.epoch, part.position, part.size, part.valid) for part in parts}) == 1
            rows = [
                as_tokens(sampler.dataset[index])  # type: ignore[index]
                for sampler, part in zip(samplers, parts)
                for index in part.indices.tolist()
            ]
            assert rows[parts[0].valid :] == [rows[parts[0].valid - 1]] * (len(rows) - parts[0].valid)
            found += rows[: parts[0].valid]
            for sampler, part in zip(samplers, parts):
                sampler.cursor = sampler.after(part)
        return found

    first = taken(samplers, cut)
    assert first == wanted[0][: min(len(first), kept[0])]
    state = json.loads(json.dumps(samplers[-1].state_dict()))
    assert len(json.dumps(state)) < 1024
    resumed = sampler_of(case, 2, ends=ends)
    resumed.load_state_dict(state)
    rest = taken([resumed])
    if ends != "drop":
        assert rest == (wanted[0][len(first) :] or wanted[1])
    else:  # Batches of another size leave out another end.
        assert rest in [outputs[: len(rest)] for outputs in (wanted[0][len(first) :], wanted[1])]


def test_the_first_batch_reads_no_more_than_it_needs_and_a_resume_nothing_before_its_place() -> None:
    documents = Documents([5] * 1000)
    loader = DataLoader(PackedDataset(documents, 10), 4, shuffle=True)
    batches = iter(loader)
    next(batches)
    assert len(documents.reads) <= 24 + 8
    for _ in range(100):
        next(batches)
    state = loader.state_dict()
    wanted = next(batches)["tokens"].numpy().copy()
    again = Documents([5] * 1000)
    resumed = DataLoader(PackedDataset(again, 10), 4, shuffle=True)
    resumed.load_state_dict(state)
    assert (next(iter(resumed))["tokens"].numpy() == wanted).all()
    assert len(again.reads) <= 24 + 8


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_filtered_dataset_has_epochs_like_any_other(num_workers: int) -> None:
    dataset = FilteredDataset([{"x": number} for number in range(50)], lambda sample: sample["x"] % 3 == 0)
    loader = DataLoader(dataset, 4, shuffle=True, num_workers=num_workers)
    epochs = [[row for batch in loader for row in batch["x"].numpy().tolist()] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 50, 3))
    assert epochs[0] != epochs[1]
    loader.set_epoch(0)
    assert [row for batch in loader for row in batch["x"].numpy().tolist()] == epochs[0]
    with pytest.raises(TypeError, match="not known in advance"):
        len(loader)
    loader.close()


def test_what_cannot_be_continued_or_begun_is_refused() -> None:
    def loader(**arguments: Any) -> Any:
        return DataLoader(FilteredDataset([{"x": n} for n in range(9)], [True] * 9), 2, **arguments)

    saved = loader(seed=1, shuffle=True)
    next(iter(saved))
    with pytest.raises(CheckpointError, match="seed was 1 and is now 2"):
        loader(seed=2, shuffle=True).load_state_dict(saved.state_dict())
    with pytest.raises(CheckpointError, match="lacks"):
        loader(seed=1, shuffle=True).load_state_dict(loader(ends="cycle", seed=1, shuffle=True).state_dict())
    with pytest.raises(ConfigError, match="keeps nothing of all 9 samples"):
        next(iter(DataLoader(FilteredDataset([{"x": n} for n in range(9)], [False] * 9), 2)))
    with pytest.raises(ConfigError, match=r"weights is for single samples; .* a dataset without weights"):
        loader(weights=[1] * 9)
    with pytest.raises(ConfigError, match="no common epochs: use ends='cycle' or CyclicSampler"):
        loader(lanes=4)
    blend = BlendedDataset([[{"x": 1}], [{"x": 2}]], [1, 1])
    with pytest.raises(ConfigError, match="a blend has no epoch"):
        DataLoader(FilteredDataset(blend, [True] * 2), 1)
