"""Who fetches batches: this loader, OneFlow's, Grain's, and the limits that no loader can pass by much."""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, Callable

import numpy as np

from libai_data import DataLoader
from libai_data.data.samplers import CyclicSampler
from libai_data.loader import trivial_batch_collator
from tools.benchmarks.rows import Contender, Measure, Unavailable

BATCH = 32
_WARM_UP = 8
_LEAST_BATCHES = 8


def seconds_a_batch(
    fetch: Callable[[], Any], seconds: float, warm_up: int = _WARM_UP, least: int = _LEAST_BATCHES
) -> float:
    """Fetch batches, letting go of each, for some seconds.

    Args:
        fetch: gives a batch.
        seconds: for how long at least.
        warm_up: batches before; what was fetched ahead while others were measured is used up so.
        least: batches that are measured at least.
    """
    for _ in range(warm_up):
        fetch()
    start, batches = time.perf_counter(), 0
    while True:
        fetch()
        batches += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds and batches >= least:
            return elapsed / batches


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
        from oneflow.utils.data import DataLoader as FlowDataLoader

        dataset = make_dataset()
        sampler = CyclicSampler(dataset, BATCH, shuffle=True)
        loader = FlowDataLoader(dataset, batch_sampler=sampler, num_workers=workers, collate_fn=trivial_batch_collator)
        batches = iter(loader)
        try:
            yield lambda: seconds_a_batch(lambda: next(batches), seconds)
        finally:
            # It has no close; its iterator ends the workers when it is gone, or when told so.
            batches._shutdown_workers()

    return Contender("oneflow", opened)


def grain_loader(make_dataset: Callable[[], Any], workers: int, seconds: float) -> Contender:
    """Grain's DataLoader over the samples' bare arrays; its batches are made OneFlow tensors, which cost no copy."""

    @contextmanager
    def opened() -> Iterator[Measure]:
        try:
            grain = importlib.import_module("grain.python")
        except ImportError:
            raise Unavailable("not installed") from None
        import oneflow as flow

        source = _Arrays(make_dataset())
        sampler = grain.IndexSampler(len(source), grain.NoSharding(), shuffle=True, num_epochs=None, seed=0)
        batch = [grain.Batch(BATCH, drop_remainder=True)]
        loader = grain.DataLoader(data_source=source, sampler=sampler, operations=batch, worker_count=workers)
        batches = iter(loader)

        def fetch() -> dict[str, Any]:
            return {name: flow.from_numpy(array) for name, array in next(batches).items()}

        yield lambda: seconds_a_batch(fetch, seconds)
        if hasattr(batches, "close"):
            batches.close()

    return Contender("grain", opened)


class _Arrays:
    """A dataset's samples as dicts of arrays."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = self._dataset.arrays(int(index))
        return arrays


def raw(make_dataset: Callable[[], Any], seconds: float) -> Contender:
    """The limit of `dataset[i]`: one process that copies its arrays into a batch that it uses again and again."""

    @contextmanager
    def opened() -> Iterator[Measure]:
        dataset = make_dataset()
        indices = _shuffled(len(dataset))
        fields = {name: value.tensor for name, value in dataset[0].get_fields().items()}
        batch = {name: np.zeros((BATCH, *array.shape), array.dtype) for name, array in fields.items()}

        def fetch() -> None:
            for row, index in enumerate(next(indices)):
                for name, value in dataset[index].get_fields().items():
                    batch[name][row] = value.tensor

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
