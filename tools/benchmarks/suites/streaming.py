"""Streamed shards: beside the same files opened locally, and beside a cache that removes what was used longest ago."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from libai_data.data.samplers import CyclicSampler
from libai_data.data.sources import open_source
from libai_data.data.sources.local_cache import LocalCache
from libai_data.data.sources.shard_counts import counted
from libai_data.data.sources.shard_table import TABLE
from libai_data.loader import BatchLoader
from tools.benchmarks.rows import AtLeast, AtMost, Contender, Measure, Row, Scale
from tools.benchmarks.slow_store import slow_store

BATCH, EPOCHS, LANES, BLOCK = 64, 3, 4, 2


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
    )
    cached = (_reading("local", folder, scale), _reading("streamed", folder, scale))
    return [
        Row("cached", f"an epoch, all shards in the cache: {work}", "0", cached, (AtLeast("streamed", "local", 0.95),)),
        Row(
            "fetched",
            f"bytes of {EPOCHS} epochs / of the data, a cache for half of them: {work}",
            "0",
            kept,
            (AtMost("next use", 2.5, "x"), AtLeast("next use", "last use"), AtMost("no room is needed", 1.0, "x")),
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


def _loading(source: Any) -> BatchLoader:
    dataset = _Rows(source)
    return BatchLoader(dataset, CyclicSampler(dataset, BATCH, shuffle=True, seed=1, lanes=LANES, block=BLOCK))


def _read(batches: Iterator[Any], source: Any, epochs: int) -> None:
    for _ in range(epochs * len(source) // BATCH):
        next(batches)


def _fetching(name: str, cache: Path, folder: Path, size: int, follows: bool) -> Contender:
    @contextmanager
    def opened() -> Iterator[Measure]:
        with slow_store(folder, delay=0) as store:

            def measured() -> float:
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
