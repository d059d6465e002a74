"""Streamed shards: the start, steps that wait, what nodes fetch; beside local files, other caches and MosaicML."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from libai_data.data.datasets import Map
from libai_data.data.samplers import CyclicSampler
from libai_data.data.sources import open_source
from libai_data.data.sources.local_cache import LocalCache
from libai_data.data.sources.shard_counts import counted
from libai_data.data.sources.shard_table import TABLE
from libai_data.loader import BatchLoader
from tools.benchmarks.belady import least_fetched
from tools.benchmarks.peer_loaders import WORKERS
from tools.benchmarks.peer_process import answer_of
from tools.benchmarks.peers import libai_data_loader, peer, reporting
from tools.benchmarks.rows import AtLeast, AtMost, Contender, Measure, Row, Scale, Unavailable
from tools.benchmarks.samples import PLAIN
from tools.benchmarks.slow_store import slow_store
from tools.benchmarks.works import write_tokens

BATCH, EPOCHS, LANES, BLOCK, LANES_OF_NODES = 64, 3, 4, 2, 64
_BANDWIDTH = 100_000_000  # bytes a second of the store from which a run starts cold
_SECONDS_OF_STEP = 0.01


def rows(scale: Scale) -> list[Row]:
    """The rows of the suite; the shards are made here, in `scale.folder`."""
    shards, samples = (40, 64) if scale.quick else (200, 2048)
    folder = _made(scale.folder / "shards", shards, samples)
    size = sum(path.stat().st_size for path in folder.iterdir())
    work = f"{shards} shards of {size // shards:,} bytes; lanes={LANES}, block={BLOCK}, batches of {BATCH}"
    kept = (
        _fetching("next use", scale.folder / "next", folder, size // 2, follows=True),
        _fetching("last use", scale.folder / "last", folder, size // 2, follows=False),
        _fetching("no room is needed", scale.folder / "all", folder, 4 * size, follows=True),
        Contender("offline minimum", partial(_least_fetched, folder, shards // 2)),
        _fetched_by_mosaicml(scale.folder / "mosaicml", folder, scale.peers_python),
    )
    cached = (_reading("local", folder, scale), _reading("streamed", folder, scale))
    first = LANES * BLOCK * (size // shards) / _BANDWIDTH
    write_tokens(scale.folder / PLAIN, 256 if scale.quick else 8192)
    return [
        Row(
            "cold",
            f"to the first batch; {_BANDWIDTH // 10**6} MB/s, 20 ms a request: {LANES * BLOCK} shards in {first:.2f} s",
            "0",
            (_starting(scale.folder / "cold", folder),),
            (AtMost("first batch", first + 0.5, "s"),),
        ),
        Row(
            "waiting",
            f"steps of {1000 * _SECONDS_OF_STEP:g} ms that wait half as long again; 1.5 times the bandwidth they need",
            "0",
            (_stepping(scale.folder / "steps", folder, 50 if scale.quick else 1000),),
            (AtMost("waiting", 3, "%"),),
        ),
        Row(
            "nodes",
            f"bytes that two nodes fetch in an epoch / of the data; lanes={LANES_OF_NODES}, block={BLOCK}",
            "0",
            (_two_nodes(scale.folder / "nodes", folder),),
            (AtMost("two nodes", 1.05, "x"),),
        ),
        Row(
            "mosaicml",
            "4 x uint16[1024] from shards in MDS, all in the cache; int64",
            str(WORKERS),
            (peer("streaming", PLAIN, scale), _from_mds(scale)),
            (AtLeast("libai_data", "streaming", 8),),
        ),
        Row("cached", f"an epoch, all shards in the cache: {work}", "0", cached, (AtLeast("streamed", "local", 0.95),)),
        Row(
            "fetched",
            f"bytes of {EPOCHS} epochs / of the data, a cache for half of them: {work}",
            "0",
            kept,
            (
                AtLeast("next use", "offline minimum", 0.99),
                AtLeast("next use", "last use"),
                AtLeast("next use", "streaming"),
                AtMost("no room is needed", 1.0, "x"),
            ),
        ),
    ]


class _Rows:
    """Samples of a source."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.shard_lengths = source.shard_lengths

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return list(self.source.read_many(indices))

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]


def _made(folder: Path, shards: int, samples: int) -> Path:
    folder.mkdir()
    for number in range(shards):
        np.save(folder / f"{number:04}.npy", np.random.default_rng(number).integers(0, 99, (samples, 1024), np.int32))
    return folder


@contextmanager
def _cache(folder: Path, size: int) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(LIBAI_DATA_CACHE_DIR=str(folder), LIBAI_DATA_CACHE_SIZE=str(size))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _LeastRecent(LocalCache):
    """A cache that knows nothing of the order."""

    def expect(self, key: str, when: int) -> None:
        pass


def _source(address: str, folder: Path) -> Any:
    if not (folder / TABLE).exists():
        counted(address, open_copy=open_source).save(str(folder / TABLE))
    return open_source(address, streaming=True)


def _loading(source: Any, node: int = 0, nodes: int = 1, lanes: int = LANES) -> BatchLoader:
    dataset = _Rows(source)
    return BatchLoader(dataset, _sampler(dataset, node, nodes, lanes))


def _sampler(dataset: _Rows, node: int = 0, nodes: int = 1, lanes: int = LANES) -> CyclicSampler:
    ranks: dict[str, Any] = {"data_parallel_rank": node, "data_parallel_size": nodes}
    return CyclicSampler(dataset, BATCH // nodes, shuffle=True, seed=1, lanes=lanes, block=BLOCK, **ranks)


def _read(batches: Iterator[Any], source: Any, epochs: int) -> None:
    for _ in range(epochs * len(source) // BATCH):
        next(batches)


def _starting(cache: Path, folder: Path) -> Contender:
    @contextmanager
    def opened() -> Iterator[Measure]:
        with slow_store(folder, bandwidth=_BANDWIDTH) as store:
            _source(store.address, folder)
            with closing(_loading(open_source(folder))) as loader:
                next(iter(loader))  # So that all modules are there.

            def measured() -> float:
                shutil.rmtree(cache, ignore_errors=True)
                start = time.perf_counter()
                with _cache(cache, 1 << 40), closing(_loading(_source(store.address, folder))) as loader:
                    next(iter(loader))
                    return time.perf_counter() - start

            yield measured

    return Contender("first batch", opened)


def _stepping(cache: Path, folder: Path, steps: int) -> Contender:
    """The share of steps, after the first, that wait for data."""

    @contextmanager
    def opened() -> Iterator[Measure]:
        bytes_a_batch = np.load(next(folder.glob("*.npy")), mmap_mode="r")[0].nbytes * BATCH
        with slow_store(folder, bandwidth=1.5 * bytes_a_batch / _SECONDS_OF_STEP) as store:

            def measured() -> float:
                shutil.rmtree(cache, ignore_errors=True)
                waiting = 0
                with _cache(cache, 1 << 40), closing(_loading(_source(store.address, folder))) as loader:
                    batches = iter(loader)
                    next(batches)
                    for _ in range(steps):
                        time.sleep(_SECONDS_OF_STEP)
                        start = time.perf_counter()
                        next(batches)
                        waiting += time.perf_counter() - start > _SECONDS_OF_STEP / 2
                return 100 * waiting / steps

            yield measured

    return Contender("waiting", opened)


def _two_nodes(cache: Path, folder: Path) -> Contender:
    @contextmanager
    def opened() -> Iterator[Measure]:
        with slow_store(folder, delay=0) as store:
            with _cache(cache, 1 << 40):
                _source(store.address, folder)  # Counting the samples may fetch all shards.

            def measured() -> float:
                shutil.rmtree(cache, ignore_errors=True)
                store.sent = 0
                for node in range(2):
                    with _cache(cache / str(node), 1 << 40):
                        source = _source(store.address, folder)
                    with closing(_loading(source, node, 2, LANES_OF_NODES)) as loader:
                        _read(iter(loader), source, 1)
                return store.sent / int(source.table.sizes.sum())

            yield measured

    return Contender("two nodes", opened)


def _from_mds(scale: Scale) -> Contender:
    """The loader over the shards that MosaicML Streaming has written for itself."""
    shards = scale.folder / f"{PLAIN}.mds"

    def samples() -> Any:
        if not shards.exists():
            raise Unavailable("MosaicML Streaming, which writes the shards, is not installed")
        return Map(open_source(f"file://{shards}", streaming=True), _as_int64)

    @contextmanager
    def opened() -> Iterator[Measure]:
        loader = libai_data_loader(samples, WORKERS, scale.seconds)
        with _cache(scale.folder / "mds", 1 << 40), loader.open() as measure:
            yield measure

    return Contender("libai_data", opened)


def _as_int64(record: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value.astype(np.int64) for name, value in record.items()}


def _fetching(name: str, cache: Path, folder: Path, size: int, follows: bool) -> Contender:
    @contextmanager
    def opened() -> Iterator[Measure]:
        with slow_store(folder, delay=0) as store:

            def measured() -> float:
                with _cache(cache, 1 << 40):
                    _source(store.address, folder)  # Counting the samples may leave shards in the cache.
                shutil.rmtree(cache, ignore_errors=True)
                with _cache(cache, size):
                    source = _source(store.address, folder)
                if not follows:
                    source._cache = _LeastRecent(source.storage.directory, source.storage.size)
                store.sent = 0
                with closing(_loading(source)) as loader:
                    _read(iter(loader), source, EPOCHS)
                return store.sent / int(source.table.sizes.sum())

            yield measured

    return Contender(name, opened)


@contextmanager
def _least_fetched(folder: Path, room: int) -> Iterator[Measure]:
    """What a cache with room for so many shards must fetch by Belady's rule, as a multiple of the data."""
    dataset = _Rows(open_source(folder))
    sampler, ends = _sampler(dataset), np.cumsum(dataset.shard_lengths)

    def needed(step: int) -> set[int]:
        batch = sampler.batch_at(BATCH * step)
        assert batch is not None, "the order is endless"
        return set(np.searchsorted(ends, batch.indices, side="right").tolist())

    def measured() -> float:
        batches = [needed(step) for step in range(EPOCHS * len(dataset) // BATCH)]
        return least_fetched(batches, np.ones(len(ends)), room, len(batches)) / len(ends)

    yield measured


def _fetched_by_mosaicml(target: Path, folder: Path, python: str) -> Contender:
    """MosaicML Streaming with the same samples in shards of its own, a cache for half of them, and blocks as large."""

    @contextmanager
    def opened() -> Iterator[Measure]:
        target.mkdir()
        numbers = map(str, (0.5, EPOCHS, BATCH, LANES * BLOCK))
        with reporting():
            found = answer_of(python, "tools.benchmarks.mosaicml_fetched", target, str(folder), *numbers)
        yield lambda: found  # It takes long, and another round would give nearly the same.

    return Contender("streaming", opened)


def _reading(name: str, folder: Path, scale: Scale) -> Contender:
    @contextmanager
    def opened() -> Iterator[Measure]:
        with slow_store(folder, delay=0) as store:
            with _cache(scale.folder / "cached", 1 << 40):
                # The table is hidden, so that it is none of the local files.
                source = _source(store.address, folder) if name == "streamed" else open_source(folder)
            with closing(_loading(source)) as loader:
                batches = iter(loader)
                _read(batches, source, 1)

                def measured() -> float:
                    start = time.perf_counter()
                    _read(batches, source, 1)
                    return time.perf_counter() - start

                yield measured

    return Contender(name, opened)
