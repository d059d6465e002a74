"""Datasets that draw from generators that all code shares, in a module that a worker process imports quickly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from random import random as early_bound
from typing import Any, Callable

import numpy as np

from libai_data.data.datasets import RandomMap
from libai_data.data.random.sample_random import sample_generator
from libai_data.data.samplers import CyclicSampler
from libai_data.loader import BatchLoader

SOURCES = ("python", "numpy", "normal", "torch", "oneflow")


def draw(source: str) -> float:
    """One number of a library's global generator."""
    if source == "python":
        return random.random() + early_bound() + random.gauss(0, 1)
    if source == "numpy":
        return float(np.random.random())
    if source == "normal":
        return float(np.random.normal())
    if source == "torch":
        import torch

        return float(torch.rand(1))
    import oneflow as flow

    return float(flow.rand(1).numpy()[0])


class Draws:
    """{"index": int64 [], "drawn": float64 [sources]}; only each `every`-th sample draws."""

    def __init__(self, sources: Sequence[str], size: int = 24, every: int = 1, first: int = 0) -> None:
        self.sources, self.size, self.every, self.first = tuple(sources), size, every, first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        draws = index % self.every == self.first
        return {"index": index, "drawn": np.array([draw(source) if draws else 0.0 for source in self.sources])}


class DrawsItems(Draws):
    """The same through `__getitems__`."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]


class DrawsFilled(Draws):
    """The same through `read_batch`."""

    def read_batch(self, indices: np.ndarray, out: dict[str, np.ndarray]) -> None:
        for row, index in enumerate(indices.tolist()):
            sample = self[index]
            out["index"][row], out["drawn"][row] = sample["index"], sample["drawn"]


class AsksForOne(Draws):
    """Asks for the generator of one sample while it reads several."""

    def __getitem__(self, index: int) -> Any:
        return {"index": index, "drawn": sample_generator().random(1)}

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]


class Seeds(Draws):
    """Seeds the global generators itself."""

    def __getitem__(self, index: int) -> Any:
        random.seed(index)
        np.random.seed(index)
        return {"index": index, "drawn": np.array([random.random(), np.random.random()])}


class FailsSometimes(Draws):
    """Fails for samples that it draws."""

    def __getitem__(self, index: int) -> Any:
        if random.random() < 0.3:
            raise OSError("no luck")
        return super().__getitem__(index)


class ReadsByALoader(Draws):
    """Reads by a loader of its own, between two draws."""

    def __init__(self, sources: Sequence[str], size: int = 24, **arguments: Any) -> None:
        super().__init__(sources, size)
        self.arguments = arguments

    def __getitem__(self, index: int) -> Any:
        before = super().__getitem__(index)["drawn"]
        inner = RandomMap(Draws(["python", "numpy"]), with_noise)
        loader = BatchLoader(inner, CyclicSampler(inner, 4), seed=5, **self.arguments)
        sums = [float(batch.noise.tensor.numpy().sum()) for batch in islice(iter(loader), 2)]
        sums.append(float(batch_sum(loader)))
        loader.close()
        after = super().__getitem__(index)["drawn"]
        own = sample_generator().random(2)
        return {"index": index, "drawn": np.concatenate([before, sums, after, own])}


def batch_sum(loader: BatchLoader) -> float:
    return float(next(iter(loader)).drawn.tensor.numpy().sum())


class ReadsByThreads(Draws):
    """Asks for generators in threads of its own."""

    def __getitem__(self, index: int) -> Any:
        with ThreadPoolExecutor(2) as pool:
            drawn = list(pool.map(lambda _: sample_generator().random(), range(2)))
        return {"index": index, "drawn": np.array(drawn)}


class HandsOutGenerators(Draws):
    """Hands generators to threads of its own."""

    def __getitem__(self, index: int) -> Any:
        generators = [sample_generator(stream) for stream in range(3)]
        with ThreadPoolExecutor(3) as pool:
            drawn = list(pool.map(lambda generator: generator.random(), generators))
        return {"index": index, "drawn": np.array(drawn)}


def with_noise(sample: Any, generator: np.random.Generator) -> dict[str, Any]:
    """A function for `RandomMap`."""
    return {**sample, "noise": np.append(sample.get("noise", np.zeros(0)), generator.random())}


def drawing_collator(samples: list[Any]) -> dict[str, np.ndarray]:
    """Draws while it makes a batch, and takes the samples apart."""
    noise = np.array([random.random(), np.random.random()])
    return {"index": np.array([sample.pop("index") for sample in samples]), "noise": np.tile(noise, (len(samples), 1))}


class Wrapped:
    """A wrapper that the package does not know.

    Args:
        index_of: from an index to that of the dataset.
    """

    def __init__(self, dataset: Any, index_of: Callable[[int], int] = int) -> None:
        self.inside, self.index_of = dataset, index_of

    def __len__(self) -> int:
        return len(self.inside)

    def __getitem__(self, index: int) -> Any:
        return self.inside[self.index_of(index)]
