"""A train loader without a state resumes by counting, with the same batches or an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai_data.data.samplers import CyclicSampler
from libai_data.engine.batches import StepInputs
from libai_data.engine.data_state import DataState
from libai_data.errors import CheckpointError, ConfigError
from libai_data.iterables import from_iterable


class Shuffled:
    """Shuffles each round by a generator of its own, as torch's loader does."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[Any]:
        return iter([{"x": number} for number in self._random.permutation(7)])


class Told:
    """Is told the round."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as for this round."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(np.random.default_rng(self.epoch).permutation(7).tolist())


KINDS: dict[str, Any] = {
    "list": lambda: [(np.arange(number), None) for number in range(5)],
    "shuffled by a seed": Shuffled,
    "told its round": Told,
    "nothing but None": lambda: [None] * 3,
    "generator": lambda: iter(range(100)),
}


def shown(batches: list[Any]) -> list[str]:
    return [repr(batch) for batch in batches]


@settings(max_examples=40)
@given(kind=st.sampled_from(list(KINDS)), cut=st.integers(0, 17), again=st.integers(0, 5), more=st.integers(1, 9))
def test_it_goes_on_with_the_batches_of_an_unbroken_run_however_often_it_is_stopped(
    kind: str, cut: int, again: int, more: int
) -> None:
    whole = StepInputs(DataState(KINDS[kind]()).loader)
    expected = shown([whole.next() for _ in range(cut + again + more)])
    found, state = [], None
    for steps in (cut, again, more):
        data = DataState(KINDS[kind]())
        if state is not None:
            data.load_state_dict(json.loads(json.dumps(state)))
        feed = StepInputs(data.loader)
        found += shown([feed.next() for _ in range(steps)])
        state = data.state_dict()
        assert len(json.dumps(state)) < 200
    assert found == expected


@pytest.mark.parametrize("package", ["torch", "oneflow"])
def test_earlier_rounds_of_a_loader_that_reads_in_order_are_not_read_again(package: str) -> None:
    data = pytest.importorskip(f"{package}.utils.data")
    read: list[int] = []

    class Noting(list[int]):
        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return np.array(index)

    def made() -> DataState:
        return DataState(data.DataLoader(Noting(range(6)), batch_size=2, collate_fn=np.stack))

    stopped = made()
    feed = StepInputs(stopped.loader)
    for _ in range(8):
        feed.next()
    read.clear()
    resumed = made()
    resumed.load_state_dict(stopped.state_dict())
    assert StepInputs(resumed.loader).next().tolist() == [4, 5]
    assert read == [0, 1, 2, 3, 4, 5]


def test_other_batches_than_before_are_refused_with_what_to_do() -> None:
    data = DataState(Shuffled(1))
    feed = StepInputs(data.loader)
    for _ in range(9):
        feed.next()
    other = DataState(Shuffled(2))
    other.load_state_dict(data.state_dict())
    with pytest.raises(CheckpointError, match=r"\(Shuffled\) has no state_dict.*epoch 1.*override=\[restart_data\]"):
        StepInputs(other.loader).next()
    on_purpose = DataState(Shuffled(2), ["seed"])
    on_purpose.load_state_dict(data.state_dict())
    unbroken = StepInputs(Shuffled(2))
    assert StepInputs(on_purpose.loader).next() == [unbroken.next() for _ in range(10)][-1]
    shorter = DataState([1])
    shorter.load_state_dict({**data.state_dict(), "batches": 2})
    with pytest.raises(CheckpointError, match="the epoch ends after 1 batches"):
        StepInputs(shorter.loader).next()


def test_data_begin_anew_only_where_that_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    sampler = CyclicSampler(range(9), 3).state_dict()
    for state in (None, sampler):
        with pytest.raises(CheckpointError, match=r"train\.resume_override=\[restart_data\]"):
            DataState([1, 2]).load_state_dict(state)
        data = DataState([1, 2], ["restart_data"])
        data.load_state_dict(state)
        assert "restarts its data" in caplog.text
        assert StepInputs(data.loader).next() == 1
    with pytest.raises(ConfigError, match="restart_data"):
        CyclicSampler(range(9), 3).load_state_dict(sampler, override=["restart"])


def test_another_rank_does_not_compare_its_own_batches() -> None:
    data = DataState([1, 2, 3])
    data.load_state_dict({"round": 0, "batches": 2, "digest": "of others", "rank": 1})
    assert StepInputs(data.loader).next() == 3


class ArrayPlace:
    """A loader whose state holds an array, which it hands out as it is and changes later."""

    def __init__(self) -> None:
        self.places = np.zeros(3, np.int64)
        self.restored = 0

    def state_dict(self) -> dict[str, Any]:
        return {"places": self.places}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.places[:] = state["places"]
        self.restored += 1


def test_the_same_state_is_restored_again_only_after_the_loader_has_moved_also_if_it_holds_arrays() -> None:
    loader = ArrayPlace()
    data = DataState(loader)
    for _ in range(2):
        data.load_state_dict({"places": np.arange(3)})
    assert loader.restored == 1
    loader.places += 1
    data.load_state_dict({"places": np.arange(3)})
    assert (loader.places.tolist(), loader.restored) == ([0, 1, 2], 2)


class OddPlace(Shuffled):
    """Its state has what JSON cannot store, or would change."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = {"workers": {0: (1, 2)}, "generator": np.arange(3)}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_a_state_of_a_loader_keeps_its_types_in_a_checkpoint() -> None:
    saved, resumed = OddPlace(), OddPlace()
    resumed.state = None
    DataState(resumed).load_state_dict(json.loads(json.dumps(DataState(saved).state_dict())))
    assert resumed.state["workers"] == {0: (1, 2)} and resumed.state["generator"].tolist() == [0, 1, 2]
    plain = {"place": 5, "epochs": [1, None, "a"]}
    saved.state = plain
    assert DataState(saved).state_dict() == plain
    DataState(resumed).load_state_dict(plain)
    assert resumed.state == plain


def numbers() -> Iterator[Any]:
    return ({"x": number} for number in range(24))


def test_a_loader_over_an_iterable_resumes_on_another_number_of_ranks_although_not_all_have_read() -> None:
    loader = from_iterable(numbers, 4)
    next(iter(loader))
    of_rank0 = loader.state_dict()
    of_others = {name: value for name, value in of_rank0.items() if name != "iterable"}
    resumed = from_iterable(numbers, 4)
    DataState(resumed).load_state_dict({"of ranks": [of_rank0, of_others]})
    assert resumed.state_dict() == of_rank0
    assert next(iter(resumed))["x"].numpy().tolist() == [4, 5, 6, 7]
