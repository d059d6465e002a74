"""A loader that shares what it reads, on one rank; tests/loader/test_life_cycle.py tests what users do with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from libai_data.config import LazyCall
from libai_data.delivery.build import build_nlp_train_loader
from libai_data.errors import CheckpointError, ConfigError, PassError
from tests.deadline import wait_until
from tests.loader.sample_datasets import Rows
from tests.loader.streams import descriptors, loader_threads


def train(**options: Any) -> Any:
    return build_nlp_train_loader(Rows(), 4, num_workers=0, readers="node", **options)[0]


def test_a_state_of_another_stream_is_refused() -> None:
    with closing(train()) as loader, closing(train(seed=1)) as other:
        state = other.state_dict()
        with pytest.raises(CheckpointError, match="seed was 1 and is now 0"):
            loader.load_state_dict(state)


def test_a_loader_that_another_thread_closes_while_it_reads_says_so() -> None:
    reads, may_go_on = threading.Event(), threading.Event()

    class Waiting(Rows):
        def __getitem__(self, index: int) -> Any:
            reads.set()
            may_go_on.wait()
            return super().__getitem__(index)

    def close() -> None:
        reads.wait()
        loader.close()
        may_go_on.set()

    loader = build_nlp_train_loader(Waiting(), 4, num_workers=0, readers="node")[0]
    closing_thread = threading.Thread(target=close)
    closing_thread.start()
    with pytest.raises(PassError, match=r"^the loader was closed$"):
        next(iter(loader))
    closing_thread.join()


class OwnSampler:
    """A user's own, which knows its own rank's lists alone."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2, 3]])


def test_a_sampler_that_does_not_know_every_ranks_part_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"readers=node needs a sampler that knows every rank's part.*OwnSampler"):
        train(sampler=LazyCall(OwnSampler)())


def test_a_loader_that_nobody_closes_leaves_nothing() -> None:
    next(iter(train()))
    open_before, threads_before = descriptors(), loader_threads()
    for _ in range(5):
        next(iter(train()))
    wait_until(
        lambda: descriptors() <= open_before and loader_threads() <= threads_before,
        "end of what was opened and started",
    )
