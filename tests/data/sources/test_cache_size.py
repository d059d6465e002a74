"""A cache of the size that an error names: enough for each epoch, and no shard is fetched more often than needed."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from libai_data.data.datasets import BlendedDataset, Subset
from libai_data.data.samplers import CyclicSampler
from libai_data.data.shard_use import most_in_use
from libai_data.data.sources import open_source, remote, streamed
from libai_data.data.sources.shard_counts import counted
from libai_data.data.sources.shard_table import TABLE
from libai_data.delivery.read_plan import READERS, ReadPlan
from libai_data.errors import ConfigError
from libai_data.loader import BatchLoader
from libai_data.mesh.parallel_mesh import ParallelMesh
from tests.deadline import wait_until
from tests.properties import examples
from tools.benchmarks.belady import least_fetched

pyarrow = pytest.importorskip("pyarrow")
EPOCHS = 3


class Shards:
    """Shards in a folder, and how often each was fetched and then read."""

    def __init__(self, folder: Path, samples: list[int], widths: list[int]) -> None:
        from pyarrow import parquet

        self.folder, self.fetched = folder, list[str]()
        self._unread = set[str]()
        for number, (rows, width) in enumerate(zip(samples, widths)):
            table = pyarrow.table({"x": range(rows), "noise": [os.urandom(width)] * rows})
            parquet.write_table(table, folder / f"{number:03}.parquet", compression="none", use_dictionary=False)
        counted(f"file://{folder}", open_copy=open_source).save(str(folder / TABLE))
        self.sizes = np.array([path.stat().st_size for path in sorted(folder.glob("*.parquet"))])

    def forget(self) -> None:
        shutil.rmtree(self.folder / "cache", ignore_errors=True)
        self.fetched.clear()
        self._unread.clear()

    def fetch(self, remote: Any, *arguments: Any) -> None:
        name = remote.url.rpartition("/")[2]
        self.fetched.append(name)
        self._unread.add(name)
        _fetch(remote, *arguments)

    def read(self, number: int) -> None:
        self._unread.discard(f"{number:03}.parquet")

    @property
    def times_fetched(self) -> int:
        """Without what was fetched for batches that were not asked for."""
        return len(self.fetched) - len(self._unread)


_fetch = remote.fetch


class Samples:
    """Samples of the shards."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self.source = open_source(f"file://{shards.folder}", streaming=True)
        self.shard_lengths = self.source.shard_lengths

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        self._shards.read(int(np.searchsorted(np.cumsum(self.shard_lengths), index, side="right")))
        return {"x": np.array(self.source[index]["x"])}


@contextmanager
def shards_of(samples: list[int], widths: list[int]) -> Iterator[Shards]:
    folder = Path(tempfile.mkdtemp())
    environment = {"LIBAI_DATA_CACHE_DIR": str(folder / "cache"), "LIBAI_DATA_CACHE_SIZE": "64GB"}
    try:
        with mock.patch.dict(os.environ, environment):
            shards = Shards(folder, samples, widths)
            with mock.patch.object(streamed, "fetch", shards.fetch):
                yield shards
    finally:
        shutil.rmtree(folder)


def threads_that_fetch_ahead() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("reads shards ahead")}


def wait_for_fetches(loader: BatchLoader) -> None:
    """Which copy is removed depends on what has arrived. On a busy machine, a read overtakes what is fetched ahead."""
    ahead = None if loader._streamed is None else loader._streamed._ahead
    if ahead is not None:
        wait_until(lambda: all(fetched.done() for _, fetched in ahead._held), "end of the fetches")


def read(shards: Shards, size: int, ranks: int, micro: int, blended: bool, **order: Any) -> tuple[int, int]:
    """Read some epochs on the ranks of one node, in turns; returns the number of steps, and of times of use."""
    shards.forget()
    with mock.patch.dict(os.environ, LIBAI_DATA_CACHE_SIZE=str(size)), ExitStack() as opened:
        before = threads_that_fetch_ahead()
        # A loader that closes does not wait for them.
        opened.callback(wait_until, lambda: threads_that_fetch_ahead() <= before, "end of what fetches ahead")
        loaders = []
        for rank in range(ranks):
            dataset: Any = Samples(shards)
            if blended:
                half = len(dataset) // 2
                dataset = BlendedDataset([Subset(dataset, 0, half), Subset(dataset, half, len(dataset))], [2, 1])
            sampler = CyclicSampler(dataset, micro, data_parallel_rank=rank, data_parallel_size=ranks, **order)
            loaders.append(opened.enter_context(closing(BatchLoader(dataset, sampler))))
        passes = [iter(loader) for loader in loaders]
        steps = EPOCHS * len(dataset) // (micro * ranks)
        for _ in range(steps):
            for loader, batches in zip(loaders, passes):
                next(batches)
                wait_for_fetches(loader)
    whole_order: Any = sampler.order
    uses = whole_order.shard_uses(range(micro * ranks), micro * ranks)
    return steps, sum(1 for _ in takewhile(lambda use: use.first < steps, uses))


def named_size(shards: Shards, *how: Any, **order: Any) -> int:
    with pytest.raises(ConfigError, match="to at least") as error:
        read(shards, int(shards.sizes.max()), *how, **order)
    found = re.search(r"to at least (\d+) bytes", str(error.value))
    assert found is not None
    return int(found[1])


class Lengths:
    """A dataset that is not read."""

    def __init__(self, samples: list[int]) -> None:
        self.shard_lengths = np.array(samples)

    def __len__(self) -> int:
        return int(self.shard_lengths.sum())


def least_of(samples: list[int], sizes: np.ndarray, room: int, steps: int, batch_size: int, **order: Any) -> int:
    """How often Belady's rule fetches shards."""
    sampler, ends = CyclicSampler(Lengths(samples), batch_size, **order), np.cumsum(samples)
    batches = [sampler.batch_at(batch_size * step) for step in range(steps + 2 * sum(samples) // batch_size)]
    needed = [set(np.searchsorted(ends, batch.indices, side="right").tolist()) for batch in batches if batch]
    return least_fetched(needed, sizes, room, steps)


orders = {
    "ranks": st.integers(1, 3),
    "micro": st.integers(1, 5),
    "lanes": st.integers(1, 5),
    "block": st.integers(1, 3),
    "seed": st.integers(0, 1000),
}


@settings(max_examples=examples(30))
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 900)), min_size=4, max_size=30),
    st.booleans(),
    st.fixed_dictionaries(orders),
)
def test_the_size_that_an_error_names_is_enough_for_each_reader_in_each_epoch(
    made: list[tuple[int, int]], blended: bool, order: dict[str, Any]
) -> None:
    samples, widths = map(list, zip(*made))
    ranks, micro = order.pop("ranks"), order.pop("micro")
    if sum(samples) < 2 * max(order["lanes"], ranks * micro):
        return
    how = (ranks, micro, blended)
    with shards_of(samples, widths) as shards:
        _, uses = read(shards, named_size(shards, *how, shuffle=True, **order), *how, shuffle=True, **order)
        assert shards.times_fetched <= uses, "a shard is fetched again while it is in use"


def test_a_cache_without_room_for_a_shard_that_comes_late_is_refused_at_the_start() -> None:
    order: dict[str, Any] = {"shuffle": False, "lanes": 1, "block": 1}
    with shards_of([5] * 8, [9] * 7 + [900]) as shards:
        size = named_size(shards, 1, 2, False, **order)
        assert size >= 2 * shards.sizes.max()
        assert read(shards, size, 1, 2, False, **order)


@settings(max_examples=examples(30))
@given(st.integers(12, 40), st.integers(4, 20), st.fixed_dictionaries({**orders, "ranks": st.integers(1, 2)}))
def test_with_the_named_size_shards_are_fetched_no_more_often_than_half_of_it_needs(
    number: int, samples: int, order: dict[str, Any]
) -> None:
    """By Belady's rule, which is the minimum for shards of equal size."""
    ranks, micro = order.pop("ranks"), order.pop("micro")
    with shards_of([samples] * number, [200] * number) as shards:
        size = named_size(shards, ranks, micro, False, shuffle=True, **order)
        steps, _ = read(shards, size, ranks, micro, False, shuffle=True, **order)
        least = least_of([samples] * number, shards.sizes, size // 2, steps, ranks * micro, shuffle=True, **order)
        assert shards.times_fetched <= least


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 99)), min_size=1, max_size=40).filter(any),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.fixed_dictionaries({name: orders[name] for name in ("lanes", "block", "seed")}),
    st.data(),
)
def test_no_epoch_needs_more_bytes_at_once_than_is_said(
    made: list[tuple[int, int]], parts: int, micro: int, at_once: int, order: dict[str, Any], data: st.DataObject
) -> None:
    samples, sizes = (np.array(column) for column in zip(*made))
    if not samples.sum():
        return
    laned: Any = CyclicSampler(Lengths(samples.tolist()), micro * parts, shuffle=True, **order).order
    part = data.draw(st.integers(0, parts - 1))
    rows, batch_size = range(part * micro, (part + 1) * micro), parts * micro
    most = laned.most_bytes(rows, batch_size, at_once, sizes)
    uses = laned.shard_uses(rows, batch_size, data.draw(st.integers(0, 100)))
    taken = [use._replace(last=use.last + at_once - 1) for use, _ in zip(uses, range(300))]
    assert most_in_use(taken, sizes) <= most


@given(*[st.integers(1, 8)] * 4, st.sampled_from(READERS))
def test_what_the_readers_of_a_node_keep_is_at_most_half_of_its_cache_on_every_mesh(
    data: int, tensor: int, pipeline: int, nodes: int, readers: str
) -> None:
    """Ranks that read the same rows keep the same shards. Also of several stages, whose nodes read the same rows."""
    assume(data * tensor * pipeline % nodes == 0)
    mesh = ParallelMesh(data, tensor, pipeline, num_nodes=nodes)
    plan, sampler = ReadPlan(mesh, readers), CyclicSampler(range(64), 1, data_parallel_size=data, lanes=None)
    for node in range(nodes):
        different = {parts for rank in plan.ranks_of(node) if (parts := plan.shards_read_by(rank))}
        shares = [sampler.serving(parts).share_of_node(mesh.parts_of_data) for parts in different]
        assert sum(shares) < 1.001, "of which each reader keeps half"
        if is_power_of_two(data * tensor * pipeline * nodes) and shares:
            assert sum(shares) > 0.999, "none of it is left unused"


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
