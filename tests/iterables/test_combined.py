"""Several loaders side by side lose no batch to an error or an interrupt of one of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

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
