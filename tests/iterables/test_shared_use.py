"""Code of one iterable never runs in two threads at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from libai_data.iterables import from_iterable, prefetcher


class Stalling:
    """Numbers, counted by the object itself, as by a file or a connection. In the first epoch, number 3 stalls."""

    def __init__(self) -> None:
        self.number, self.epoch = 0, 0
        self.stalls, self.goes_on, self.has_gone_on = threading.Event(), threading.Event(), threading.Event()

    def set_epoch(self, epoch: int) -> None:
        self.number, self.epoch = 0, epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.number < 12:
            if self.number == 3 and self.epoch == 0:
                self.stalls.set()
                assert self.goes_on.wait(60)
                self.number += 1
                self.has_gone_on.set()
            else:
                self.number += 1
            yield {"number": self.number - 1}


class BeginningAtItsState:
    """Numbers; as in a Hugging Face stream, each pass through the epoch of a restored state begins at the state."""

    def __init__(self) -> None:
        self.epoch = self.taken = 0
        self.start: dict[str, int] = {}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.taken = self.start.get("taken", 0) if self.start.get("epoch") == self.epoch else 0
        while self.taken < 12:
            self.taken += 1
            yield {"number": self.taken - 1}

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state


def hugging_face_stream() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"number": list(range(12))}).to_iterable_dataset()


@pytest.mark.parametrize("make", [BeginningAtItsState, hugging_face_stream])
def test_a_restored_state_decides_one_pass_alone(make: Any) -> None:
    source = make()

    def numbers(batches: Any) -> list[int]:
        return [number for batch in batches for number in batch["number"].tolist()]

    stopped, resumed, other = (from_iterable(source, 2) for _ in range(3))
    stopped.set_epoch(1)
    batches = iter(stopped.numpy())
    assert numbers(next(batches) for _ in range(3)) == list(range(6))
    resumed.load_state_dict(stopped.state_dict())
    assert numbers(resumed.numpy()) == list(range(6, 12))
    for loader in (resumed, other):
        loader.set_epoch(1)
        assert numbers(loader.numpy()) == list(range(12))


def test_an_item_that_comes_late_moves_nothing_in_the_next_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetcher, "_END_SECONDS", 0.01)
    source = Stalling()
    loader = from_iterable(source, 1, prefetch=2)
    batches = iter(loader.numpy())
    assert next(batches)["number"].tolist() == [0]
    assert next(batches)["number"].tolist() == [1]
    assert source.stalls.wait(60)
    late = threading.Timer(0.1, source.goes_on.set)
    late.start()
    batches = iter(loader.numpy())
    found = next(batches)["number"].tolist()
    assert source.has_gone_on.wait(60)
    found += [number for batch in batches for number in batch["number"].tolist()]
    assert found == list(range(12))
    late.join()
