"""A Ctrl-C between any two lines of the loader: the next pass goes on where the state says, with nothing lost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Callable

import numpy as np
import pytest

import libai_data.loader
from libai_data.structures import DistTensorData, Instance
from tests.loader.streams import WORKER_NAMES, WORKERS, content, loading, stream

LOADER = str(Path(libai_data.loader.__file__).parent)
BATCHES = 12
LINES_BETWEEN = {"in-process": 1, "thread": 3, "fork": 17, "spawn": 67}
"""Each line in turn is interrupted where a worker costs nothing; elsewhere every so many."""


class Numbers:
    """Samples that tell which they are."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Instance:
        return Instance(number=DistTensorData(np.full(3, index)))


@contextmanager
def interrupted_at(line: int) -> Iterator[None]:
    """Raise KeyboardInterrupt before the n-th line of the loader's code that this thread runs."""
    left = line

    def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        nonlocal left
        if not frame.f_code.co_filename.startswith(LOADER):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("arguments", WORKERS, ids=WORKER_NAMES)
def test_an_interrupt_at_any_line_loses_no_batch(arguments: dict[str, Any], request: pytest.FixtureRequest) -> None:
    dataset = Numbers()
    expected = stream(dataset, batches=BATCHES)
    between = LINES_BETWEEN[request.node.callspec.id]
    line, interruptions = 0, 0
    while interruptions == line // between:
        line += between
        with loading(dataset, prefetch=2, **arguments) as loader:
            batches = iter(loader)
            taken = [content(next(batches)) for _ in range(2)]
            try:
                with interrupted_at(line):
                    taken += [content(batch) for batch in islice(batches, 1)]
            except KeyboardInterrupt:
                interruptions += 1
            place = loader.state_dict()["position"] // 4
            # The batch under way when the interrupt came was taken or not; the state knows.
            assert place in (2, 3) and taken[:place] == expected[: len(taken)]
            rest = [content(batch) for batch in islice(iter(loader), BATCHES - place)]
            assert rest == expected[place:], f"interrupted at line {line}"
    assert interruptions > 2
