"""Several loaders side by side lose no batch to an error or an interrupt of one of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from libai_data.errors import SampleError
from libai_data.iterables import from_iterable
from libai_data.iterables.combined import CombinedLoader
from libai_data.structures import Instance


class Counting:
    """A loader of the numbers from where it stands; raises once, when it is asked for a certain one."""

    def __init__(self, raises_at: int = -1, error: type[BaseException] = RuntimeError) -> None:
        self.next, self.raises_at, self.error = 0, raises_at, error

    def __iter__(self) -> Iterator[Instance]:
        return self

    def __next__(self) -> Instance:
        if self.next == self.raises_at:
            self.raises_at = -1
            raise self.error("once")
        self.next += 1
        return Instance(number=self.next - 1)


class FailsOnce:
    """Samples of their indices; one of them fails when it is read first."""

    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, int]:
        if index == self.fails_at:
            self.fails_at = -1
            raise OSError("once")
        return {"number": index}


def numbers(batch: Any) -> tuple[int, int]:
    return batch.get("a").get("number"), batch.get("b").get("number")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("anew", [False, True])
def test_parts_stay_together_after_one_loader_failed(error: type[BaseException], anew: bool) -> None:
    loader = CombinedLoader({"a": Counting(), "b": Counting(2, error)})
    batches = iter(loader)
    assert [numbers(next(batches)) for _ in range(2)] == [(0, 0), (1, 1)]
    with pytest.raises(error):
        next(batches)
    batches = iter(loader) if anew else batches
    assert [numbers(next(batches)) for _ in range(2)] == [(2, 2), (3, 3)]


@pytest.mark.parametrize("how", ["the pass continues", "a state is restored", "the loader is closed"])
def test_no_loader_is_a_batch_ahead_after_another_one_failed(how: str) -> None:
    def both(fails_at: int = -1) -> CombinedLoader:
        parts = {"a": FailsOnce(), "b": FailsOnce(fails_at)}
        return CombinedLoader({name: from_iterable(part, 1, ends="cycle") for name, part in parts.items()})

    loader = both(fails_at=2)
    batches = iter(loader)
    found = [next(batches) for _ in range(2)]
    with pytest.raises(SampleError, match="once"):
        next(batches)
    if how == "a state is restored":
        state, loader = loader.state_dict(), both()
        loader.load_state_dict(state)
    elif how == "the loader is closed":
        loader.close()
    batches = iter(loader)
    found += [next(batches) for _ in range(2)]
    assert [[batch[name]["number"].numpy().tolist() for name in "ab"] for batch in found] == [
        [[number], [number]] for number in range(4)
    ]
    loader.close()
