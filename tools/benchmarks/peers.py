"""Who fetches batches: this loader, OneFlow's, those of `peer_loaders`, and the limits no loader can pass by much."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Callable

import numpy as np

from libai_data import DataLoader
from libai_data.data.samplers import CyclicSampler
from libai_data.loader import trivial_batch_collator
from tools.benchmarks.peer_process import PeerError, PeerProcess
from tools.benchmarks.rows import Contender, Measure, Scale, Unavailable
from tools.benchmarks.timing import BATCH, seconds_a_batch

_log = logging.getLogger(__name__)
_SECONDS_TO_SEND = 60


def libai_data_loader(make_dataset: Callable[[], Any], workers: int, seconds: float) -> Contender:
    """This project's loader."""

    @contextmanager
    def opened() -> Iterator[Measure]:
        dataset = make_dataset()
        with closing(DataLoader(dataset, CyclicSampler(dataset, BATCH, shuffle=True), num_workers=workers)) as loader:
            batches = iter(loader)
            yield lambda: seconds_a_batch(lambda: next(batches), seconds)

    return Contender("libai_data", opened)


def oneflow_loader(make_dataset: Callable[[], Any], workers: int, seconds: float) -> Contender:
    """OneFlow's DataLoader as LiBai uses it: samples of OneFlow tensors, stacked by the trivial collator."""

    @contextmanager
    def opened() -> Iterator[Measure]:
        from oneflow.multiprocessing import unlink_all_shared_memory
        from oneflow.utils.data import DataLoader as FlowDataLoader

        dataset = make_dataset()
        sampler = CyclicSampler(dataset, BATCH, shuffle=True)
        loader = FlowDataLoader(dataset, batch_sampler=sampler, num_workers=workers, collate_fn=trivial_batch_collator)
        batches = iter(loader)
        try:
            yield lambda: seconds_a_batch(lambda: next(batches), seconds)
        finally:
            # It has no close; its iterator ends the workers when it is gone, or when told so. Workers that are sending
            # batches then may leave their shared memory behind, as does a tensor that fails to remove its own.
            for _ in range(batches._tasks_outstanding):
                batches._worker_result_queue.get(timeout=_SECONDS_TO_SEND)
            batches._shutdown_workers()
            unlink_all_shared_memory()

    return Contender("oneflow", opened)


def peer(name: str, work: str, scale: Scale) -> Contender:
    """A loader of `peer_loaders`, measured by a process of its own, in the environment that has its packages.

    One that fails is reported as such, and the others are measured.
    """

    @contextmanager
    def opened() -> Iterator[Measure]:
        with ExitStack() as stack:
            with reporting():
                process = stack.enter_context(PeerProcess(scale.peers_python, name, work, scale.folder))

            def measure() -> float:
                with reporting():
                    return process.measure(scale.seconds)

            yield measure

    return Contender(name, opened)


@contextmanager
def reporting() -> Iterator[None]:
    """Report a peer that fails as unavailable."""
    try:
        yield
    except PeerError as error:
        _log.warning("%s", error)
        raise Unavailable("failed") from error


def raw(make_dataset: Callable[[], Any], seconds: float) -> Contender:
    """The limit of `dataset[i]`: one process that copies its arrays into a batch that it uses again and again."""

    @contextmanager
    def opened() -> Iterator[Measure]:
        dataset = make_dataset()
        indices = _shuffled(len(dataset))
        batch = {name: np.zeros((BATCH, *array.shape), array.dtype) for name, array in dataset[0].items()}

        def fetch() -> None:
            for row, index in enumerate(next(indices)):
                for name, array in dataset[index].items():
                    batch[name][row] = array

        yield lambda: seconds_a_batch(fetch, seconds)

    return Contender("raw", opened)


def gather(map_tokens: Callable[[], np.ndarray], seconds: float) -> Contender:
    """The limit of `read_batch`: one vectorised read of a batch from the memory map into an array used again."""

    @contextmanager
    def opened() -> Iterator[Measure]:
        tokens = map_tokens()
        indices = (np.array(batch) for batch in _shuffled(len(tokens)))
        batch = np.zeros((BATCH, *tokens.shape[1:]), np.int64)

        def fetch() -> None:
            batch[...] = tokens[next(indices)]

        yield lambda: seconds_a_batch(fetch, seconds)

    return Contender("gather", opened)


def _shuffled(samples: int) -> Iterator[list[int]]:
    """Lists of indices without end, made in advance, so that the limits pay nothing for the order."""
    order = np.random.default_rng(0).permutation(samples)
    return itertools.cycle(order[: samples // BATCH * BATCH].reshape(-1, BATCH).tolist())
