"""The loader: batches per second beside OneFlow's loader, Grain's and raw copies; time to start; memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any, Callable

from libai_data import DataLoader
from libai_data.data.samplers import CyclicSampler
from tools.benchmarks import processes
from tools.benchmarks.peers import BATCH, gather, grain_loader, libai_data_loader, oneflow_loader, raw
from tools.benchmarks.rows import AtLeast, AtMost, Row, Scale, contender
from tools.benchmarks.works import (
    FlowImages,
    FlowTokens,
    TokenBatches,
    Tokens,
    make_images,
    map_tokens,
    write_tokens,
)

WORKERS = 2
LONG = 10**8
TOKENS = "tokens: 4 x int64[1024] from a uint16 memory map"
IMAGES = "images: float32[3,224,224] from memory, and a label"


def rows(scale: Scale) -> list[Row]:
    """The rows of the loader's suite; the data is made here, in `scale.folder`."""
    import oneflow  # noqa: F401  # A trainer has it; its import is not part of any measurement.

    path = write_tokens(scale.folder / "tokens.bin", 256 if scale.quick else 8192)
    return [*_tokens(scale, path), *_read_batch(scale, path), *_images(scale), *_limits(scale, path)]


def _tokens(scale: Scale, path: Any) -> list[Row]:
    dataset = lambda: Tokens(map_tokens(path))  # noqa: E731
    ours = partial(libai_data_loader, dataset, seconds=scale.seconds)
    limit = raw(dataset, scale.seconds)
    peers = (
        oneflow_loader(lambda: FlowTokens(map_tokens(path)), WORKERS, scale.seconds),
        grain_loader(dataset, WORKERS, scale.seconds),
    )
    claims = (AtLeast("libai_data", "oneflow", 7), AtLeast("libai_data", "raw", 1.2), AtLeast("libai_data", "grain"))
    return [
        Row("tokens-0", TOKENS, "0", (ours(workers=0), limit), (AtLeast("libai_data", "raw", 0.8),)),
        Row("tokens-2", TOKENS, "2", (*peers, ours(workers=WORKERS), limit), claims),
    ]


def _read_batch(scale: Scale, path: Any) -> list[Row]:
    ours = partial(libai_data_loader, lambda: TokenBatches(map_tokens(path)), seconds=scale.seconds)
    limit = gather(lambda: map_tokens(path), scale.seconds)
    claims = (AtLeast("libai_data", "gather", 0.5),)
    return [
        Row(f"read_batch-{workers}", "the same, read_batch", str(workers), (ours(workers=workers), limit), claims)
        for workers in (0, WORKERS)
    ]


def _images(scale: Scale) -> list[Row]:
    images = make_images(64 if scale.quick else 512)
    ours = partial(libai_data_loader, lambda: images, seconds=scale.seconds)
    limit = raw(lambda: images, scale.seconds)
    peer = oneflow_loader(lambda: FlowImages(images.images, images.labels), WORKERS, scale.seconds)
    claims = (AtLeast("libai_data", "oneflow", 15), AtLeast("libai_data", "raw", 0.6))
    return [
        Row("images-0", IMAGES, "0", (ours(workers=0), limit), (AtLeast("libai_data", "raw", 0.8),)),
        Row("images-2", IMAGES, "2", (peer, ours(workers=WORKERS), limit), claims),
    ]


def _limits(scale: Scale, path: Any) -> list[Row]:
    def each(make: Callable[[Scale, Any, str], float], limit: float, unit: str) -> tuple[Any, Any]:
        contenders = tuple(contender(method, partial(make, scale, path, method)) for method in ("spawn", "fork"))
        return contenders, tuple(AtMost(contender.name, limit, unit) for contender in contenders)

    batches = 200 if scale.quick else 5000
    growth = (
        contender("memory", partial(_growth, path, batches, processes.resident)),
        contender("descriptors", partial(_growth, path, batches, processes.descriptors)),
    )
    no_growth = (AtMost("memory", 1.0, "MB"), AtMost("descriptors", 0, "more"))
    return [
        Row("first_batch", "construction to first batch, 10^8 samples, shuffled", "2", *each(_first_batch, 0.5, "s")),
        Row("memory", "private memory of a worker beyond the data", "2", *each(_private_memory, 60, "MB")),
        Row("growth", f"growth over {batches} batches, after {batches}", "2", growth, no_growth),
    ]


def _loader(path: Any, length: int = 0, start_method: str = "auto") -> DataLoader:
    dataset = Tokens(map_tokens(path), length)
    sampler = CyclicSampler(dataset, BATCH, shuffle=True)
    return DataLoader(dataset, sampler, num_workers=WORKERS, start_method=start_method)


def _first_batch(scale: Scale, path: Any, start_method: str) -> float:
    start = time.perf_counter()
    with closing(_loader(path, LONG, start_method)) as loader:
        next(iter(loader))
        return time.perf_counter() - start


def _private_memory(scale: Scale, path: Any, start_method: str) -> float:
    others = set(processes.descendants())
    with closing(_loader(path, start_method=start_method)) as loader:
        _take(iter(loader), 20 if scale.quick else 500)
        workers = set(processes.descendants()) - others
        return max(processes.private_beyond(pid, str(path), "/memfd:libai_data") for pid in workers)


def _growth(path: Any, batches: int, count: Callable[[int], float]) -> float:
    others = set(processes.descendants())
    with closing(_loader(path)) as loader:
        iterator = iter(loader)
        _take(iterator, batches)
        counted = {os.getpid(), *processes.descendants()} - others
        before = sum(count(pid) for pid in counted)
        _take(iterator, batches)
        return sum(count(pid) for pid in counted) - before


def _take(batches: Iterator[Any], count: int) -> None:
    for _ in range(count):
        next(batches)
