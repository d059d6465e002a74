"""Several loaders side by side lose no batch to an error or an interrupt of one of them."""

from __future__ import annotations

import _thread
import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice, repeat
from types import SimpleNamespace
from typing import Any

import pytest

from libai_data.data.samplers.cursor import Cursor
from libai_data.errors import SampleError
from libai_data.iterables import from_iterable
from libai_data.iterables.combined import CombinedLoader
from libai_data.loader.iteration import Pass
from libai_data.loader.one_thread import OneThread
from libai_data.structures import Instance
from tests.loader.interrupting import without_collections


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


class InterruptingCursor(Cursor):
    """When the next cursor replaces this one, a Ctrl-C comes, which Python handles after the next call."""

    __del__ = partial(_thread.interrupt_main)


class InterruptingParts(dict[str, Any]):
    """Parts of a batch. When the batch has been handed out, a Ctrl-C comes."""

    __del__ = partial(_thread.interrupt_main)


def counting_pass() -> Pass:
    kinds: Iterator[type[Cursor]] = chain([InterruptingCursor], repeat(Cursor))
    taken = ((Instance(number=number), kind(number + 1)) for number, kind in enumerate(kinds))
    stream = SimpleNamespace(cursor=Cursor(0))
    return Pass(stream, stream.cursor, lambda: next(taken), OneThread())


@pytest.mark.skipif(sys.version_info < (3, 10), reason="Python 3.9 handles a signal after each assignment, too")
def test_a_ctrl_c_when_a_loader_moves_or_the_batch_is_handed_out_loses_no_part() -> None:
    loader = CombinedLoader({"a": counting_pass(), "b": Counting()})
    loader._taken = InterruptingParts()
    found: list[Any] = []
    interrupts = 0
    while len(found) < 4:
        with without_collections():
            try:
                for batch in islice(loader, 4 - len(found)):
                    found.append(batch)
            except KeyboardInterrupt:
                interrupts += 1
    assert [numbers(batch) for batch in found] == [(number, number) for number in range(4)]
    assert interrupts
