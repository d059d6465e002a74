"""The interface of a loader that shares what it reads, on one rank; what spans ranks is in tests/distributed/."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any, Callable

import pytest

from libai_data.delivery.build import build_nlp_test_loader, build_nlp_train_loader
from libai_data.errors import CheckpointError, ConfigError, PassError, PeerError
from libai_data.structures import batch_info
from tests.deadline import wait_until
from tests.loader.sample_datasets import Rows
from tests.loader.streams import content, descriptors, loader_threads

SHARED = ["node", "rank0"]


@pytest.fixture
def train() -> Iterator[Callable[..., Any]]:
    """Makes training loaders with batches of 4, closed at the end."""
    made: list[Any] = []

    def make(readers: str, dataset: Any = None, **options: Any) -> Any:
        made.append(build_nlp_train_loader(dataset or Rows(), 4, num_workers=0, readers=readers, **options)[0])
        return made[-1]

    yield make
    for loader in made:
        loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_stream_is_that_of_a_rank_that_reads_for_itself(workers: int) -> None:
    streams = []
    for mode in ("every_rank", *SHARED):
        loader, _, _ = build_nlp_train_loader(Rows(), 4, num_workers=workers, seed=5, readers=mode)
        streams.append([content(batch) for batch in islice(iter(loader), 30)])
        loader.close()
    assert streams[0] == streams[1] == streams[2]


@pytest.mark.parametrize("readers", SHARED)
def test_a_round_ends_and_begins_anew(readers: str) -> None:
    loader = build_nlp_test_loader(Rows(), 8, num_workers=0, readers=readers)
    first, second = ([content(batch) for batch in loader] for _ in range(2))
    assert len(first) == len(loader) == 7
    assert [fields for _, fields in first] == [fields for _, fields in second]
    assert [info.epoch for info, _ in first + second] == [0] * 7 + [1] * 7
    assert first[-1][0].valid == 2
    loader.close()


def test_only_the_newest_pass_is_given_batches(train: Callable[..., Any]) -> None:
    loader = train("node")
    old = iter(loader)
    next(old)
    new = iter(loader)
    with pytest.raises(PassError, match="a newer iterator"):
        next(old)
    info = batch_info(next(new))
    assert info is not None
    assert info.position == 4


def test_restoring_breaks_off_the_pass(train: Callable[..., Any]) -> None:
    loader = train("node")
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    next(batches)
    loader.load_state_dict(state)
    with pytest.raises(PassError, match="a state was restored"):
        next(batches)
    info = batch_info(next(iter(loader)))
    assert info is not None
    assert info.position == 12


def test_a_state_of_another_stream_is_refused(train: Callable[..., Any]) -> None:
    with pytest.raises(CheckpointError, match="seed was 1 and is now 0"):
        train("node").load_state_dict(train("node", seed=1).state_dict())


def test_a_sampler_that_does_not_know_every_ranks_part_is_refused(train: Callable[..., Any]) -> None:
    from libai_data.config import LazyCall

    with pytest.raises(ConfigError, match=r"readers=node needs a sampler that knows every rank's part.*OwnSampler"):
        train("node", sampler=LazyCall(OwnSampler)())


class OwnSampler:
    """A user's own, which knows its own rank's lists alone."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2, 3]])


def test_a_closed_loader_says_so(train: Callable[..., Any]) -> None:
    loader = train("node")
    next(iter(loader))
    loader.close()
    loader.close()
    with pytest.raises(PeerError, match="this loader was closed"):
        iter(loader)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("readers", SHARED)
def test_a_broken_sample_fails_its_own_batch_and_none_before_it(readers: str, workers: int) -> None:
    loader = build_nlp_test_loader(Rows(broken=21), 4, num_workers=workers, readers=readers)
    taken = []
    with pytest.raises(Exception, match="sample 21 cannot be read"):
        for batch in loader:
            taken.append(batch.get("y").tensor.numpy().tolist())
    assert taken == [list(range(first, first + 4)) for first in range(0, 20, 4)]
    loader.close()


def test_a_loader_that_nobody_closes_leaves_nothing() -> None:
    def use() -> None:
        loader, _, _ = build_nlp_train_loader(Rows(), 4, num_workers=0, readers="node")
        next(iter(loader))

    use()
    open_before, threads_before = descriptors(), loader_threads()
    for _ in range(5):
        use()
    wait_until(lambda: descriptors() <= open_before, "end of what was opened")
    assert loader_threads() <= threads_before
