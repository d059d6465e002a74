"""Finite passes over filters and packers: each sample once an epoch, without a scan, resumed exactly on any mesh."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice, zip_longest
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai_data import DataLoader
from libai_data.data.datasets import BlendedDataset, FilteredDataset, OneRound, PackedDataset
from libai_data.data.samplers import CyclicSampler
from libai_data.data.samplers.lane_order import lane_of_turn
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
    return TransformRounds(case.dataset(), micro, True, rank, ranks, 1, ends, case.lanes)


def expected(case: Case, epoch: int) -> list[tuple[int, Any]]:
    """The outputs of an epoch, each with its lane. Lanes take turns; each has the outputs of a round of its samples."""
    order = sampler_of(case, 1).order
    places = epoch * order.size + np.arange(order.size)
    of_turns = [_outputs_of(case, order.locate(places[places % order.lanes == turn])[1]) for turn in range(order.lanes)]
    lanes = lane_of_turn(order.lanes).tolist()
    rounds = [[(lanes[turn], output) for turn, output in enumerate(each)] for each in zip_longest(*of_turns)]
    return [output for each in rounds for output in each if output[1] is not None]


def _outputs_of(case: Case, indices: np.ndarray) -> list[Any]:
    keep = None if case.keep is None else is_even
    samples = Ordered(case.dataset().dataset, indices.tolist())
    packed = PackedDataset(samples, case.units, cut=case.cut, keep=keep, window=case.window)
    return [as_tokens(sample) for sample in map(OneRound(packed).__getitem__, range(len(OneRound(packed))))]


@settings(max_examples=examples(60))
@given(
    cases(), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.sampled_from(["short", "pad", "drop"]), st.integers(0, 8)
)
def test_each_epoch_has_the_outputs_of_a_round_on_every_mesh_and_after_every_cut(
    case: Case, ranks: int, micro: int, ends: str, cut: int
) -> None:
    wanted = [expected(case, epoch) for epoch in range(2)]
    samplers = [sampler_of(case, micro, rank, ranks, ends) for rank in range(ranks)]

    def taken(samplers: list[TransformRounds], batches: int | None = None) -> list[list[Any]]:
        found: list[list[Any]] = []
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
            found.append(rows[: parts[0].valid])
            for sampler, part in zip(samplers, parts):
                sampler.cursor = sampler.after(part)
        return found

    def in_batches(outputs: list[tuple[int, Any]], size: int) -> list[list[Any]]:
        """Cut into batches, in which the rows are sorted by lane."""
        batches = [outputs[start : start + size] for start in range(0, len(outputs), size)]
        full = [batch for batch in batches if ends != "drop" or len(batch) == size]
        return [[output for _, output in sorted(batch, key=lambda row: row[0])] for batch in full]

    least = min(map(len, wanted))
    if ends == "drop" and least < ranks * micro:
        with pytest.raises(ConfigError, match=f"leaves out all .* of an epoch, fewer than .* {ranks * micro} "):
            for _ in wanted:
                taken(samplers)
        return
    first = taken(samplers, cut)
    assert first == in_batches(wanted[0], ranks * micro)[:cut]
    states = [json.loads(json.dumps(sampler.state_dict())) for sampler in samplers]
    assert states == states[:1] * ranks
    assert len(json.dumps(states[0])) < 1024 + 64 * samplers[0].order.lanes
    resumed = sampler_of(case, 2, ends=ends)
    resumed.load_state_dict(states[0])
    rest = in_batches(wanted[0][sum(map(len, first)) :], 2)
    # Batches of another size leave out another end.
    if ends == "drop" and least < 2:
        return
    assert taken([resumed]) == (rest or in_batches(wanted[1], 2) if sum(map(len, first)) else rest)


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
    with pytest.raises(CheckpointError, match=r"seed was 1 and is now 2; .*resume_override=\[restart_data\]$"):
        loader(seed=2, shuffle=True).load_state_dict(saved.state_dict())
    with pytest.raises(CheckpointError, match="lacks"):
        loader(seed=1, shuffle=True).load_state_dict(loader(ends="cycle", seed=1, shuffle=True).state_dict())
    with pytest.raises(ConfigError, match="keeps none of the 9 samples"):
        next(iter(DataLoader(FilteredDataset([{"x": n} for n in range(9)], [False] * 9), 2)))
    with pytest.raises(ConfigError, match=r"weights is for single samples; .* a dataset without weights"):
        loader(weights=[1] * 9)
    with pytest.raises(ConfigError, match="the shards of a list are not known"):
        loader(lanes=4)
    blend = BlendedDataset([[{"x": 1}], [{"x": 2}]], [1, 1])
    with pytest.raises(ConfigError, match="a blend has no epoch"):
        DataLoader(FilteredDataset(blend, [True] * 2), 1)


class Shards:
    """Samples of shards of any lengths."""

    def __init__(self, lengths: list[int]) -> None:
        self.shard_lengths = np.array(lengths)

    def __len__(self) -> int:
        return int(self.shard_lengths.sum())

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"x": np.array(index)}


@settings(max_examples=examples(30))
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    st.lists(st.booleans(), min_size=9, max_size=9).filter(any),
    st.integers(1, 6),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.integers(0, 9),
)
def test_lanes_that_have_nothing_left_leave_their_turns_to_the_others(
    lengths: list[int], kept: list[bool], lanes: int, ranks: int, known: bool, cut: int
) -> None:
    """Whatever lanes keep: each epoch has each kept sample once, on any mesh and after any cut."""
    keep = [kept[index * len(lengths) % 9] for index in range(sum(lengths))]
    if not any(keep):
        return

    def sampler_of(micro: int, rank: int = 0, size: int = 1) -> TransformRounds:
        dataset = FilteredDataset(Shards(lengths), keep if known else lambda sample: keep[int(sample["x"])])
        return TransformRounds(dataset, micro, True, rank, size, seed=1, lanes=lanes, block=2)

    def epoch_of(sampler: TransformRounds) -> Iterator[tuple[Any, list[int]]]:
        sampler.cursor = sampler.next_pass()
        for part in sampler.batches(sampler.position):
            sampler.cursor = sampler.after(part)
            yield part, [int(sampler.dataset[start]["x"]) for start in part.indices.tolist()]  # type: ignore[index]
        sampler.cursor = sampler.after_pass()

    one, many = sampler_of(4), [sampler_of(4 // ranks, rank, ranks) for rank in range(ranks)]
    for _ in range(2):
        whole = [rows for _, rows in epoch_of(one)]
        assert sorted(row for rows in whole for row in rows) == np.flatnonzero(keep).tolist()
        of_ranks = [
            [row for _, rows in parts for row in rows][: parts[0][0].valid]
            for parts in zip(*(epoch_of(sampler) for sampler in many))
        ]
        assert of_ranks == whole
    stopped = sampler_of(4 // ranks, 0, ranks)
    for _ in islice(epoch_of(stopped), min(cut, len(whole) - 1)):
        pass
    resumed = sampler_of(4)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    rest = [rows for _, rows in epoch_of(resumed)]
    fresh = sampler_of(4)
    assert rest == [rows for _, rows in epoch_of(fresh)][min(cut, len(whole) - 1) :]


def test_an_epoch_whose_places_do_not_fit_into_a_start_is_refused() -> None:
    dataset = FilteredDataset(range(1000), [True] * 1000)
    sampler = TransformRounds(dataset, 4)
    last = (1 << 40) // 1000 - 1
    sampler.set_epoch(last)
    assert {batch.epoch for batch in sampler.batches(0)} == {last}
    sampler.set_epoch(last + 1)
    with pytest.raises(ConfigError, match=f"epoch {last + 1} of 1000 samples is too late .*; the last is {last}"):
        next(sampler.batches(0))


@pytest.mark.parametrize("known", [True, False])
def test_a_sample_too_long_to_be_cut_is_refused(known: bool) -> None:
    longest = 1 << 23
    for length in (longest, longest + 1):
        samples = [{"x": np.zeros(length, np.uint8)}]
        dataset = PackedDataset(samples, 1 << 22, lengths=[length] if known else None)
        sampler = CyclicSampler(dataset, 4)
        if length > longest:
            with pytest.raises(ConfigError, match=rf"has {length} tokens, but a packer can cut {longest} at most"):
                sampler.batch_at(0)
        else:
            starts = sampler.batch_at(0).indices.tolist()  # type: ignore[union-attr]
            assert starts == [0, 1 << 62, 1, (1 << 62) + 1]


@pytest.mark.parametrize("options", [{"cut": True}, {"cut": False, "window": 2}])
def test_a_packer_of_a_dataset_that_grows_keeps_its_epochs(options: Any) -> None:
    samples = [{"x": np.full(3, number)} for number in range(5)]
    batches = iter(DataLoader(PackedDataset(samples, 4, **options), 1))
    found = [next(batches)]
    samples += samples
    found += batches
    tokens = [batch["x"].numpy()[batch["segment_ids"].numpy() > 0] for batch in found]
    assert np.concatenate(tokens).tolist() == np.repeat(np.arange(5), 3).tolist()
