"""The state of a loader: what was taken and nothing that was read ahead; of this dataset and of no other."""

from __future__ import annotations

import json
from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np
import pytest

from libai_data.data.datasets import ConcatDataset, Subset
from libai_data.data.samplers import CyclicSampler, SingleRoundSampler, StepSchedule
from libai_data.errors import CheckpointError, ConfigError, PassError
from libai_data.loader import BatchLoader
from libai_data.structures import DistTensorData, Instance


class Numbers:
    """Samples that tell their index."""

    def __init__(self, length: int = 30, offset: int = 0) -> None:
        self.length = length
        self.offset = offset

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Instance:
        return Instance(number=DistTensorData(np.array([index + self.offset])))


class Hashed(Numbers):
    """Says itself what it holds."""

    def fingerprint(self) -> Any:
        return {"offset": self.offset}


def loader_of(dataset: Any, workers: int = 0, **options: Any) -> BatchLoader:
    sampler = CyclicSampler(dataset, options.pop("micro_batch_size", 4), shuffle=True, seed=options.pop("seed", 1))
    return BatchLoader(dataset, sampler, num_workers=workers, worker_type="thread", **options)


def numbers(loader: BatchLoader, count: int) -> list[list[int]]:
    return [batch.number.tensor.numpy().ravel().tolist() for batch in islice(iter(loader), count)]


@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize("kind", [CyclicSampler, SingleRoundSampler])
def test_a_sampler_that_something_else_moves_during_a_pass_is_told(kind: Any, end: bool) -> None:
    sampler = kind(Numbers(8), 4)
    loader, other = (BatchLoader(Numbers(8), sampler) for _ in range(2))
    state = sampler.state_dict()
    for move in (lambda: next(iter(other)), lambda: sampler.set_epoch(3), lambda: sampler.load_state_dict(state)):
        batches = iter(loader)
        for _ in range(1 + end):
            next(batches)
        move()
        for _ in range(2):
            with pytest.raises(PassError, match=r"was moved during this pass.*a sampler of its own for each loader"):
                next(batches)
    sampler.set_epoch(5)
    assert next(iter(loader)).number is not None
    assert loader.state_dict()["position"] == 5 * 8 + 4


@pytest.mark.parametrize("kind", [CyclicSampler, SingleRoundSampler])
@pytest.mark.parametrize("length", [7, 9])
def test_a_sampler_of_a_dataset_of_another_length_is_refused(kind: Any, length: int) -> None:
    with pytest.raises(ConfigError, match=f"is for a dataset of 8 samples, and Numbers has {length}"):
        BatchLoader(Numbers(length), kind(Numbers(8), 4))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_read_ahead_are_not_counted_at_any_cut_point(workers: int) -> None:
    with closing(loader_of(Numbers(), workers, prefetch=6)) as loader:
        batches, states, taken = iter(loader), [loader.state_dict()], []
        for _ in range(12):
            taken.append(next(batches).number.tensor.numpy().ravel().tolist())
            states.append(json.loads(json.dumps(loader.state_dict())))
    assert [state["position"] for state in states] == [4 * step for step in range(13)]
    with closing(loader_of(Numbers(), 2 - workers)) as resumed:
        for cut in range(9):
            resumed.load_state_dict(states[cut])
            assert numbers(resumed, 4) == taken[cut : cut + 4]


@pytest.mark.parametrize("cut", range(9))
def test_epochs_after_a_resume_are_whole(cut: int) -> None:
    with closing(loader_of(Numbers(30))) as loader, closing(loader_of(Numbers(30))) as resumed:
        taken = numbers(loader, cut)
        resumed.load_state_dict(loader.state_dict())
        taken += numbers(resumed, 30 - cut)
    stream = [number for batch in taken for number in batch]
    for epoch in range(4):
        assert sorted(stream[30 * epoch : 30 * (epoch + 1)]) == list(range(30))


@pytest.mark.parametrize("cut", range(8))
def test_a_single_round_that_was_resumed_and_run_to_its_end_starts_the_next_one_whole(cut: int) -> None:
    def one_round() -> BatchLoader:
        return BatchLoader(Numbers(29), SingleRoundSampler(range(29), 4, shuffle=True, seed=2))

    with closing(one_round()) as loader, closing(one_round()) as resumed:
        whole, second = numbers(one_round(), 99), one_round()
        second.set_epoch(1)
        numbers(loader, cut)
        if cut:
            assert loader.state_dict()["position"] == 4 * cut
        resumed.load_state_dict(loader.state_dict())
        assert numbers(resumed, 99) == whole[cut:]
        assert numbers(resumed, 99) == numbers(second, 99) != whole
        assert len(whole) == len(resumed) == 8


@pytest.mark.parametrize(
    ("other", "options", "message"),
    [
        (Numbers(31), {}, r"samples was 31 and is now 30.*resume_override=\[dataset\]"),
        (Hashed(30), {}, "dataset's name was 'Hashed' and is now 'Numbers'"),
        (Numbers(30), {"seed": 7}, r"seed was 7 and is now 1.*resume_override=\[seed\]"),
        (Hashed(31), {"seed": 7}, r"name was 'Hashed' and is now 'Numbers', samples was 31.*seed was 7"),
    ],
)
def test_the_state_of_another_dataset_or_seed_is_refused_with_both_values(
    other: Any, options: dict[str, Any], message: str
) -> None:
    state = loader_of(other, **options).state_dict()
    loader = loader_of(Numbers(30))
    with pytest.raises(CheckpointError, match=message):
        loader.load_state_dict(state)
    loader.load_state_dict(state, override=["dataset", "seed"])


def test_a_dataset_tells_its_content_apart_by_its_own_fingerprint_which_json_can_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = loader_of(Hashed(30, offset=1)).state_dict()
    with pytest.raises(CheckpointError, match=r"content was \{'offset': 1\} and is now \{'offset': 0\}"):
        loader_of(Hashed(30)).load_state_dict(state)
    loader_of(Hashed(30)).load_state_dict(state, override=["dataset"])
    monkeypatch.setattr(Hashed, "fingerprint", lambda _: {1, 2})
    with pytest.raises(ConfigError, match=r"Hashed.fingerprint\(\) returned \{1, 2\}, which JSON cannot hold"):
        loader_of(Hashed(30)).state_dict()


def test_the_content_of_some_samples_can_be_hashed() -> None:
    state = loader_of(Numbers(30, offset=1), content_hash=3, seed=8).state_dict()
    loader_of(Numbers(30, offset=1), content_hash=3).load_state_dict(state, override=["seed"])
    loader_of(Numbers(30)).load_state_dict(state, override=["seed"])
    with pytest.raises(CheckpointError, match="dataset's samples was"):
        loader_of(Numbers(30), content_hash=3).load_state_dict(state, override=["seed"])
    with pytest.raises(ConfigError, match="content_hash is -1"):
        loader_of(Numbers(30), content_hash=-1)


@pytest.mark.parametrize(
    "form",
    [
        lambda number: (np.full(2, number), f"no {number}"),
        lambda number: {"of": [{"x": number}], "texts": ["a", f"no {number}"]},
        lambda number: np.full(2, number),
    ],
)
def test_the_content_of_samples_of_any_form_can_be_hashed(form: Any) -> None:
    def state(first: int) -> Any:
        return loader_of([form(first + number) for number in range(30)], content_hash=3).state_dict()

    assert state(0) == state(0)
    assert state(0) != state(1)


def test_datasets_put_together_are_told_apart_by_their_parts() -> None:
    both = ConcatDataset([Numbers(10), Hashed(20, offset=3)])
    state = loader_of(both).state_dict()
    assert state["dataset"] == {
        "name": "ConcatDataset",
        "content": [{"name": "Numbers", "samples": 10}, {"name": "Hashed", "content": {"offset": 3}, "samples": 20}],
    }
    loader_of(ConcatDataset([Numbers(10), Hashed(20, offset=3)])).load_state_dict(json.loads(json.dumps(state)))
    with pytest.raises(CheckpointError, match="dataset's content was"):
        loader_of(ConcatDataset([Numbers(20), Numbers(10)])).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"'part': \[0, 30\].*'part': \[5, 35\]"):
        loader_of(Subset(Numbers(40), 5, 35)).load_state_dict(loader_of(Subset(Numbers(40), 0, 30)).state_dict())


def test_a_mix_of_hundreds_of_datasets_still_has_a_small_state() -> None:
    loader = loader_of(ConcatDataset([Hashed(3, offset=number) for number in range(300)]))
    assert len(json.dumps(loader.state_dict())) < 1024
    loader.load_state_dict(loader.state_dict())


def test_a_loader_follows_steps_whose_batches_grow() -> None:
    with closing(loader_of(Numbers(30), 2, micro_batch_size=2)) as loader:
        loader.follow(StepSchedule(((0, 2), (3, 6))))
        taken = numbers(loader, 6)
        state = loader.state_dict()
    assert [len(batch) for batch in taken] == [2, 2, 2, 6, 6, 6]
    with closing(loader_of(Numbers(30))) as one_size:
        stream = [number for batch in numbers(one_size, 6) for number in batch]
    assert [number for batch in taken for number in batch] == stream
    assert state["batch_sizes"] == [[0, 2], [3, 6]]


@pytest.mark.parametrize("sampler", [[[0, 1], [2, 3]], SingleRoundSampler(range(30), 2)])
def test_a_loader_over_a_users_own_lists_or_of_one_round_cannot_follow_steps(sampler: Any) -> None:
    with pytest.raises(ConfigError, match=r"(ListedBatches|SingleRoundSampler) has no endless stream"):
        BatchLoader(Numbers(30), sampler).follow(StepSchedule(((0, 2),)))


def test_the_last_ragged_batch_of_a_round_is_resumed_like_any_other() -> None:
    loader = BatchLoader(Numbers(10), SingleRoundSampler(range(10), 4))
    whole = numbers(loader, 99)
    assert whole == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 9, 9]]
    numbers(loader, 2)
    resumed = BatchLoader(Numbers(10), SingleRoundSampler(range(10), 4))
    resumed.load_state_dict(loader.state_dict())
    assert numbers(resumed, 99) == whole[2:]
