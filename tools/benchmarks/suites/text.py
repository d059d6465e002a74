"""Text: building the index of 10^10 tokens, and GPT samples beside a vectorised gather."""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Callable

import numpy as np

from libai_data.data.datasets.gpt import GPTDataset
from libai_data.data.sources import IndexedSource, IndexedWriter
from libai_data.data.sources.indexed_format import index_header
from tools.benchmarks.peer_loaders import WORKERS
from tools.benchmarks.peers import libai_data_loader
from tools.benchmarks.rows import AtLeast, AtMost, Contender, Measure, Row, Scale, contender
from tools.benchmarks.samples import TOKENS as LENGTH
from tools.benchmarks.timing import BATCH, seconds_a_batch

GIGABYTE = 1e9
GPT = "GPT samples: 2 x int64[1024] from a uint16 .bin file"
_LONGEST = 2000
_KINDS: dict[str, dict[str, Any]] = {"shuffled": {"shuffle_documents": True}, "packed": {"packing": True}}


def rows(scale: Scale) -> list[Row]:
    """The rows of the text suite; the corpora are made here, in `scale.folder`."""
    corpus = write_corpus(scale.folder / "corpus", 10**6 if scale.quick else 2 * 10**7)
    many = write_lengths(scale.folder / "many", 10**5 if scale.quick else 10**7)
    return [*_index(many), *_samples(scale, corpus)]


def write_corpus(prefix: Path, tokens: int, vocabulary: int = 50000) -> Path:
    """Write random tokens as documents of 1 to 2,000."""
    random = np.random.default_rng(0)
    with IndexedWriter(prefix) as writer:
        for length in random.integers(1, _LONGEST + 1, tokens // (_LONGEST // 2)):
            writer.add_document([random.integers(0, vocabulary, length, dtype=np.uint16)])
    return prefix


def write_lengths(prefix: Path, documents: int) -> Path:
    """Write the index of documents of 1,000 tokens in the mean, over a `.bin` file that takes no room."""
    sizes = np.random.default_rng(0).integers(1, _LONGEST, documents, dtype=np.int32)
    ends = np.cumsum(sizes, dtype=np.int64)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(index_header(np.uint16, documents, documents + 1))
        file.write(sizes.data)
        file.write(((ends - sizes) * 2).data)
        file.write(np.arange(documents + 1).data)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(int(ends[-1]) * 2)
    return prefix


def _index(prefix: Path) -> list[Row]:
    bounds = IndexedSource(prefix)
    work = f"index of {bounds.num_documents:.0e} documents, {len(bounds.tokens):.0e} tokens"
    limits = {"seconds": AtMost("seconds", 20, "s"), "memory": AtMost("memory", 2, "GB")}
    return [
        Row(
            f"index-{kind}",
            f"{work}, {kind}",
            "0",
            tuple(contender(name, partial(_build, prefix, kind, place)) for place, name in enumerate(limits)),
            tuple(limits.values()),
        )
        for kind in _KINDS
    ]


def _build(prefix: Path, kind: str, place: int) -> float:
    """Open the files and build the index in a process of its own; its seconds, or its greatest memory in GB."""
    for path in Path(f"{prefix}.cache").glob("*"):
        path.unlink()
    # Not a fork, which would have this process's memory.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_built, prefix, kind).result()[place]


def _built(prefix: Path, kind: str) -> tuple[float, float]:
    start = time.perf_counter()
    GPTDataset(prefix, LENGTH, **_KINDS[kind])
    seconds = time.perf_counter() - start
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIGABYTE


def gather(prefix: Path, seconds: float) -> Contender:
    """The limit: one vectorised read of a batch from the memory map, into arrays used again."""

    @contextmanager
    def opened() -> Iterator[Measure]:
        tokens = IndexedSource(prefix).tokens
        windows = np.lib.stride_tricks.sliding_window_view(tokens, LENGTH + 1)
        order = np.random.default_rng(0).permutation((len(tokens) - 1) // LENGTH) * LENGTH
        batches = _endless(order[: len(order) // BATCH * BATCH].reshape(-1, BATCH))
        input_ids, labels = (np.zeros((BATCH, LENGTH), np.int64) for _ in range(2))

        def fetch() -> None:
            found = windows[next(batches)]
            input_ids[...], labels[...] = found[:, :-1], found[:, 1:]

        yield lambda: seconds_a_batch(fetch, seconds)

    return Contender("gather", opened)


def _endless(batches: np.ndarray) -> Iterator[np.ndarray]:
    while True:
        yield from batches


def _samples(scale: Scale, corpus: Path) -> list[Row]:
    limit = gather(corpus, scale.seconds)

    def row(kind: str, workers: int, floor: float | None, **options: Any) -> Row:
        dataset: Callable[[], Any] = lambda: GPTDataset(corpus, LENGTH, **options)  # noqa: E731
        ours = libai_data_loader(dataset, workers, scale.seconds)
        return Row(f"gpt-{kind}", GPT, str(workers), (ours, limit), (AtLeast("libai_data", "gather", floor),))

    return [row("0", 0, 0.6), *(row(kind, WORKERS, None, **options) for kind, options in _KINDS.items())]
