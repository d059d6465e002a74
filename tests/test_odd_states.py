"""Each state that can be restored refuses what cannot have been saved, by an error that names the key and its value."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any, Callable

import numpy as np
import pytest

from libai_data import DataLoader
from libai_data.data.datasets.blend import BlendedDataset
from libai_data.data.datasets.stream_transform import FilteredDataset
from libai_data.data.samplers import CyclicSampler, SingleRoundSampler
from libai_data.data.samplers.schedule import StepSchedule
from libai_data.engine.data_state import CountedLoader
from libai_data.errors import CheckpointError, ConfigError, SampleError
from libai_data.iterables.combined import CombinedLoader
from libai_data.iterables.from_iterable import from_iterable
from libai_data.loader.batch_loader import BatchLoader
from tests.engine.tiny import TinyDataset

DATASET = TinyDataset(40)
ODD: list[Any] = [None, "1", "x", 1.5, float("nan"), -3, True, [], {}, [[1, 2, 3]], [["a", 1]], 2**70, object()]

WORDS = (
    "differ from the lists before the checkpoint",  # of a digest
    "differ from the batches before the checkpoint",
    "differ from the rows before the checkpoint",
    "Rows raised TypeError",  # of the iterable's own state
    "was that of samples and is now that of a stream transform",
    "the loaders are ['a']",
    "because it has no state_dict",
)


class Rows:
    """Keeps a state of its own."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        start, self.taken = self.taken, 0
        for number in range(start, 40):
            self.taken = number + 1
            yield {"x": np.full(3, number)}

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


def followed() -> BatchLoader:
    sampler = CyclicSampler(DATASET, 4, shuffle=True)
    sampler.follow(StepSchedule(((0, 4), (3, 8))), skip_steps=((1, 1),))
    return BatchLoader(DATASET, sampler)


def indexed(dataset: Any, sampler: Any, *options: Any) -> BatchLoader:
    return BatchLoader(dataset, sampler(dataset, 4, *options))


KINDS: dict[str, Callable[[], Any]] = {
    "cyclic": lambda: indexed(DATASET, CyclicSampler, True),
    "steps": followed,
    "blend": lambda: indexed(BlendedDataset([DATASET, TinyDataset(8)], [1, 2]), CyclicSampler),
    "filter": lambda: indexed(FilteredDataset(DATASET, lambda sample: True), CyclicSampler),
    "one round": lambda: indexed(DATASET, SingleRoundSampler),
    "filter in epochs": lambda: DataLoader(FilteredDataset(DATASET, lambda sample: True), 4, shuffle=True),
    "filter in epochs in lanes": lambda: DataLoader(FilteredDataset(DATASET, lambda sample: True), 4, lanes=2),
    "lists": lambda: BatchLoader(DATASET, [[0, 1], [2, 3], [4, 5]]),
    "sampler": lambda: CyclicSampler(DATASET, 4),
    "samples": lambda: from_iterable([{"x": np.ones(3)}] * 40, 4),
    "iterable": lambda: from_iterable(lambda: iter([{"x": np.ones(3)}] * 40), 4),
    "own state": lambda: from_iterable(Rows(), 4, ends="cycle"),
    "shards": lambda: from_iterable(lambda shard, num_shards: iter([{"x": np.ones(3)}] * 40), 4, ends="drop"),
    "counted": lambda: CountedLoader([1, 2, 3]),
    "several": lambda: CombinedLoader({"a": from_iterable([{"x": np.ones(3)}] * 40, 4)}),
}


def paths_in(state: Mapping[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in state.items():
        yield (*before, key)
        # What a dataset's fingerprint or the digests of shards hold is compared as it is.
        if isinstance(value, Mapping) and key not in ("dataset", "rows_digests"):
            yield from paths_in(value, (*before, key))


def part_with(state: Any, path: tuple[str, ...]) -> Any:
    """The part of a state that has the last key of a path."""
    for key in path[:-1]:
        state = state[key]
    return state


def begun(kind: str) -> dict[str, Any]:
    loader = KINDS[kind]()
    batches = iter(loader)
    next(batches), next(batches)
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return state


@pytest.mark.parametrize("kind", KINDS)
def test_an_odd_value_of_any_key_is_refused_by_name_or_leads_on(kind: str) -> None:
    saved = begun(kind)
    for path in paths_in(saved):
        for value in ODD:
            loader = KINDS[kind]()
            state = copy.deepcopy(saved)
            part_with(state, path)[path[-1]] = value
            try:
                loader.load_state_dict(state)
                json.dumps(loader.state_dict())
                next(iter(loader))
            except (CheckpointError, SampleError) as error:
                assert path[-1] in str(error) or any(words in str(error) for words in WORDS), (path, value, error)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_without_a_key_is_refused_or_leads_on(kind: str) -> None:
    saved = begun(kind)
    for path in paths_in(saved):
        loader = KINDS[kind]()
        state = copy.deepcopy(saved)
        del part_with(state, path)[path[-1]]
        try:
            loader.load_state_dict(state)
            next(iter(loader))
        except CheckpointError as error:
            assert path[-1] in str(error) or any(words in str(error) for words in WORDS), (path, error)
        else:
            assert loader.state_dict()["position" if kind != "several" else "loaders"], path


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("sampler", "counted", "several")])
def test_a_state_that_is_refused_changes_nothing(kind: str) -> None:
    saved = begun(kind)
    for path in paths_in(saved):
        for value in [*ODD, "absent"]:
            loader, state = KINDS[kind](), copy.deepcopy(saved)
            before = loader.state_dict()
            part_with(state, path)[path[-1]] = value
            if value == "absent":
                del part_with(state, path)[path[-1]]
            try:
                loader.load_state_dict(state)
            except CheckpointError:
                assert loader.state_dict() == before, (path, value)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        *((kind, ("position",), value) for kind in ("iterable", "own state") for value in (4, 9, 12, 400)),
        *((kind, ("iterable", "row"), value) for kind in ("iterable", "own state") for value in (0, 4, 9, 400)),
        ("iterable", ("epoch",), 3),
        ("iterable", ("iterable", "epoch"), 3),
        ("own state", ("iterable", "epoch"), 3),
        ("own state", ("iterable", "source", "row"), 9),
    ],
)
def test_a_state_of_rows_that_contradicts_itself_is_refused(kind: str, path: tuple[str, ...], value: int) -> None:
    state = begun(kind)
    part_with(state, path)[path[-1]] = value
    with pytest.raises(CheckpointError, match=f"contradicts itself: .*{value}.*delete"):
        KINDS[kind]().load_state_dict(state)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", [None, 3, "state", [], ["position"], {}, {1: 2}])
def test_what_is_no_state_is_refused(kind: str, state: Any) -> None:
    with pytest.raises(CheckpointError, match="data state"):
        KINDS[kind]().load_state_dict(state)


@pytest.mark.parametrize("saved_by", KINDS)
def test_a_state_of_another_kind_is_refused_or_leads_on(saved_by: str) -> None:
    state = begun(saved_by)
    for kind, make in KINDS.items():
        loader = make()
        try:
            loader.load_state_dict(state)
        except CheckpointError:
            continue
        assert next(iter(loader)) is not None, kind


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("counted", "several", "own state", "filter")])
def test_an_epoch_is_set_or_refused_by_name(kind: str) -> None:
    loader = KINDS[kind]()
    for epoch in (*ODD, 2**62, 2**31, np.float64(1), np.array([1, 2])):
        with pytest.raises(ConfigError, match="epoch is"):
            loader.set_epoch(epoch)
    for epoch in (0, np.int32(2), np.uint8(1), 2**31 - 1):
        loader.set_epoch(epoch)
        json.dumps(loader.state_dict())
    loader.set_epoch(np.int8(1))
    assert next(iter(loader)) is not None
