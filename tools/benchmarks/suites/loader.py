"""The loader: batches per second beside raw copies of the same samples; time to start; memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any, Callable

from libai_data import DataLoader
from libai_data.data.samplers import CyclicSampler
from tools.benchmarks import processes, samples
from tools.benchmarks.peer_loaders import WORKERS
from tools.benchmarks.peers import gather, libai_data_loader, raw
from tools.benchmarks.rows import AtLeast, AtMost, Row, Scale, contender
from tools.benchmarks.samples import MappedImages, PlainTokens, map_tokens
from tools.benchmarks.timing import BATCH
from tools.benchmarks.works import LongTokens, TokenBatches, write_images, write_tokens

TOKENS = "tokens: 4 x int64[1024] from a uint16 memory map"
IMAGES = "images: float32[3,224,224] from memory, and a label"


def rows(scale: Scale) -> list[Row]:
    """The rows of the loader's suite; the data is made here, in `scale.folder`."""
    import oneflow  # noqa: F401  # A trainer has it; its import is not part of any measurement.

    path = str(write_tokens(scale.folder / samples.PLAIN, 256 if scale.quick else 8192))
    images = str(write_images(scale.folder / samples.IMAGES, 64 if scale.quick else 256))
    kinds: dict[str, tuple[str, Callable[[], Any]]] = {
        "plain": (TOKENS, lambda: PlainTokens(path)),
        "images": (IMAGES, lambda: MappedImages(images)),
    }
    floor = (AtLeast("libai_data", "raw", 0.8),)
    alone = [
        Row(f"{kind}-0", work, "0", (libai_data_loader(dataset, 0, scale.seconds), raw(dataset, scale.seconds)), floor)
        for kind, (work, dataset) in kinds.items()
    ]
    return [*alone, *_read_batch(scale, path), *_limits(scale, path)]


def _read_batch(scale: Scale, path: str) -> list[Row]:
    limit = gather(lambda: map_tokens(path), scale.seconds)
    work, dataset = f"{TOKENS}, read_batch", lambda: TokenBatches(path)
    return [
        Row(
            f"read_batch-{workers}",
            work,
            str(workers),
            (libai_data_loader(dataset, workers, scale.seconds), limit),
            (AtLeast("libai_data", "gather", 0.5),),
        )
        for workers in (0, WORKERS)
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
        Row("first_batch", "construction to first batch, 10^8 samples, shuffled", "2", *each(_first_batch, 0.2, "s")),
        Row("memory", "private memory of a worker beyond the data", "2", *each(_private_memory, 60, "MB")),
        Row("growth", f"growth over {batches} batches, after {batches}", "2", growth, no_growth),
    ]


def _loader(dataset: Any, start_method: str = "auto") -> DataLoader:
    sampler = CyclicSampler(dataset, BATCH, shuffle=True)
    return DataLoader(dataset, sampler, num_workers=WORKERS, start_method=start_method)


def _first_batch(scale: Scale, path: Any, start_method: str) -> float:
    start = time.perf_counter()
    with closing(_loader(LongTokens(path), start_method)) as loader:
        next(iter(loader))
        return time.perf_counter() - start


def _private_memory(scale: Scale, path: Any, start_method: str) -> float:
    others = set(processes.descendants())
    with closing(_loader(PlainTokens(path), start_method)) as loader:
        _take(iter(loader), 20 if scale.quick else 500)
        workers = set(processes.descendants()) - others
        return max(processes.private_beyond(pid, str(path), "/memfd:libai_data") for pid in workers)


def _growth(path: Any, batches: int, count: Callable[[int], float]) -> float:
    others = set(processes.descendants())
    with closing(_loader(PlainTokens(path))) as loader:
        iterator = iter(loader)
        _take(iterator, batches)
        counted = {os.getpid(), *processes.descendants()} - others
        before = sum(count(pid) for pid in counted)
        _take(iterator, batches)
        return sum(count(pid) for pid in counted) - before


def _take(batches: Iterator[Any], count: int) -> None:
    for _ in range(count):
        next(batches)
