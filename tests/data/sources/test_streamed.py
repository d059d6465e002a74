"""Streamed shards: the records of the same files opened locally, in a cache that is smaller than they are."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import closing
from io import StringIO
from itertools import count
from pathlib import Path
from threading import Event, Thread, current_thread
from typing import Any

import numpy as np
import pytest

from libai_data.commands.conversion import main as convert
from libai_data.commands.index import main as index
from libai_data.commands.plan import streaming_report
from libai_data.data.datasets import (
    BlendedDataset,
    ConcatDataset,
    FilteredDataset,
    Map,
    OneRound,
    PackedDataset,
    RandomPart,
    Subset,
)
from libai_data.data.samplers import CyclicSampler
from libai_data.data.samplers.transform_rounds import TransformRounds
from libai_data.data.shard_use import ShardUse, bytes_a_batch
from libai_data.data.sources import fetch_log, open_source, remote, streamed
from libai_data.data.sources.fetch_log import FetchLog
from libai_data.data.sources.local_cache import LocalCache, is_used
from libai_data.data.sources.read_ahead import ReadAhead
from libai_data.data.sources.remote import fetch
from libai_data.data.sources.shard_table import TABLE
from libai_data.errors import ConfigError, FormatError, SampleError, StorageError, bytes_in_words
from libai_data.loader import BatchLoader, get_worker_info
from libai_data.loader.same_dataset import WorkersCopy
from libai_data.mesh.parallel_mesh import ParallelMesh
from tests.data.sources.object_store import BUCKET, SILENT, STALL, ObjectStore
from tests.data.sources.published_files import WebFolder
from tests.data.sources.record_files import ENDINGS, WRITERS, same, texts, write
from tests.deadline import stretched
from tests.full_disk import small_disk
from tests.loader.streams import worker_pids
from tests.properties import slowly
from tools.benchmarks.belady import least_fetched

pyarrow = pytest.importorskip("pyarrow")

SHARDS, SAMPLES, BYTES = 10, 20, 1 << 14
FOLDER = f"s3://{BUCKET}/shards"
IN_LANES: dict[str, Any] = {"shuffle": True, "lanes": 2, "block": 1}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of shards."""
    from pyarrow import parquet

    folder = tmp_path_factory.mktemp("shards")
    for shard in range(SHARDS):
        noise = np.random.default_rng(shard).bytes(BYTES)
        rows = [{"x": shard * SAMPLES + row, "noise": noise[row::SAMPLES]} for row in range(SAMPLES)]
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{shard:02}.parquet", compression="none")
    return folder


@pytest.fixture
def store(served: ObjectStore, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The shards with their table, and a cache for six of them."""
    if served.holds != local:
        served.empty()
        for path in local.iterdir():
            served.put(f"shards/{path.name}", path.read_bytes())
        assert index([FOLDER]) == 0
        served.holds = local
    monkeypatch.setenv("LIBAI_DATA_CACHE_DIR", str(tmp_path / "streamed"))
    monkeypatch.setenv("LIBAI_DATA_CACHE_SIZE", str(8 * (local / "00.parquet").stat().st_size))
    served.gets.clear()
    return served


class Numbers:
    """Samples of a source."""

    def __init__(self, source: Any, is_found: bool = True) -> None:
        self.source = source if is_found else None
        self._records = source
        self.shard_lengths = source.shard_lengths

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        return {"x": np.array(self._records[number]["x"])}


def fetched(store: ObjectStore) -> Counter[str]:
    return Counter(path.rpartition("/")[2] for path in store.gets if path.endswith(".parquet"))


def test_opening_reads_the_table_alone_and_records_are_those_of_the_files(
    store: ObjectStore, local: Path, tmp_path: Path
) -> None:
    source, expected = open_source(FOLDER, streaming=True), open_source(local)
    assert not fetched(store)
    assert source.shard_lengths.tolist() == expected.shard_lengths.tolist()
    order = np.random.default_rng(0).permutation(len(expected))[:40]
    assert source.read_many(order) == expected.read_many(order)
    assert pickle.loads(pickle.dumps(source))[7] == expected[7]
    held = sum(path.stat().st_size for path in (tmp_path / "streamed" / "files").glob("*.parquet"))
    assert held <= source.storage.size


def sampler_of(dataset: Any) -> CyclicSampler:
    return CyclicSampler(dataset, 10, seed=3, **IN_LANES)


def halves_of(numbers: Any) -> BlendedDataset:
    return BlendedDataset([Subset(numbers, 0, 5 * SAMPLES), Subset(numbers, 5 * SAMPLES, SHARDS * SAMPLES)], [1, 1])


@pytest.mark.parametrize(
    ("workers", "of", "room"),
    [
        (1, Numbers, 8),
        slowly(2, Numbers, 8),
        slowly(0, Numbers, 8),
        slowly(0, lambda source: halves_of(Numbers(source)), 15),
    ],
)
def test_a_training_streams_the_batches_of_local_files_and_fetches_each_shard_once_an_epoch(
    store: ObjectStore, local: Path, workers: int, of: Any, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a blend, which has two shards in use for each lane."""
    monkeypatch.setenv("LIBAI_DATA_CACHE_SIZE", str(room * (local / "00.parquet").stat().st_size))
    dataset, expected = of(open_source(FOLDER, streaming=True)), sampler_of(of(open_source(local)))
    with closing(BatchLoader(dataset, sampler_of(dataset), num_workers=workers)) as loader:
        for _, indices, batch in zip(range(len(dataset) // 10), expected, loader):
            assert batch["x"].numpy().tolist() == indices
        loader.close()
        # What is fetched ahead belongs to the next epoch.
        assert sum(fetched(store).values()) <= SHARDS + 6


def number_of(row: Any) -> dict[str, np.ndarray]:
    return {"x": np.array(row["x"])}


HALVES = (slice(0, 5), slice(5, SHARDS))


def tokens_of(row: Any) -> dict[str, np.ndarray]:
    return {"input_ids": np.array([row["x"], row["x"]])}


WITHIN: dict[str, tuple[Any, dict[str, Any]]] = {
    "mapped": (lambda one, two: Map(one, number_of), IN_LANES),
    "part": (lambda one, two: Subset(Map(one, number_of), range(SAMPLES, 5 * SAMPLES - 7)), IN_LANES),
    "one behind the other": (lambda one, two: Map(ConcatDataset([one, two]), number_of), IN_LANES),
    "blend": (lambda one, two: BlendedDataset([Map(one, number_of), Map(two, number_of)], [3, 1]), {}),
    "blend in lanes": (lambda one, two: BlendedDataset([Map(one, number_of), Map(two, number_of)], [3, 1]), IN_LANES),
    "filter": (lambda one, two: FilteredDataset(Map(ConcatDataset([one, two]), number_of), _is_odd), {}),
    "mask": (lambda one, two: FilteredDataset(Map(one, number_of), np.arange(len(one)) % 3 > 0), {}),
    "packer": (lambda one, two: PackedDataset(Map(one, tokens_of), 6, lengths=[2] * len(one)), {}),
    "mask in lanes": (lambda one, two: FilteredDataset(Map(one, number_of), np.arange(len(one)) % 3 > 0), IN_LANES),
    "packer in lanes": (lambda one, two: PackedDataset(Map(one, tokens_of), 6, lengths=[2] * len(one)), IN_LANES),
    "outputs": (lambda one, two: OneRound(PackedDataset(Map(one, tokens_of), 6, lengths=[2] * len(one))), {}),
    "listed": (lambda one, two: Subset(Map(one, number_of), list(range(0, 90, 2))), {}),
}


def _is_odd(sample: Any) -> bool:
    return bool(sample["x"] % 2)


@pytest.mark.parametrize(
    "names", [("one behind the other", "blend", "blend in lanes", "packer in lanes", "packer"), slowly(tuple(WITHIN))]
)
def test_sources_within_other_datasets_are_fetched_ahead(
    names: tuple[str, ...], store: ObjectStore, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetchers: list[str] = []

    def noting(*arguments: Any) -> None:
        fetchers.append(current_thread().name)
        fetch(*arguments)

    monkeypatch.setattr(streamed, "fetch", noting)
    # Those of a batch, those of the batch before it, and those of the next one.
    monkeypatch.setenv("LIBAI_DATA_CACHE_SIZE", str(13 * (local / "00.parquet").stat().st_size))

    def batches_of(name: str, sources: Any) -> list[bytes]:
        dataset = WITHIN[name][0](*sources)
        with closing(BatchLoader(dataset, CyclicSampler(dataset, 10, seed=3, **WITHIN[name][1]))) as loader:
            fetchers.clear()
            shutil.rmtree(tmp_path / "streamed", ignore_errors=True)
            batches, found = iter(loader), []
            for _ in range(len(dataset) // 10):
                ahead = None if loader._streamed is None else loader._streamed._ahead
                wait([] if ahead is None else [fetched for _, fetched in ahead._held])
                found.append(b"".join(field.numpy().tobytes() for field in next(batches).values()))
            return found

    paths = sorted(local.iterdir())
    halves = [f"{FOLDER}/0[0-4].parquet", f"{FOLDER}/0[5-9].parquet"]
    for name in names:
        found = batches_of(name, [open_source(half, streaming=True) for half in halves])
        assert len(fetchers) >= 4 and all("ahead" in thread for thread in fetchers), (name, fetchers)
        assert found == batches_of(name, [open_source(paths[half]) for half in HALVES]), name


@pytest.mark.parametrize("keep", [_is_odd, np.arange(SHARDS * SAMPLES) % 2 > 0], ids=["measured", "known"])
def test_shuffled_epochs_of_a_filter_in_lanes_stream_through_a_small_cache(
    keep: Any, store: ObjectStore, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (local / "00.parquet").stat().st_size
    monkeypatch.setenv("LIBAI_DATA_CACHE_SIZE", str(9 * size))  # lanes times block is 2 shards; all of them are 10
    epochs: list[list[list[int]]] = []
    for rank in range(2):
        dataset = FilteredDataset(Map(open_source(FOLDER, streaming=True), number_of), keep)
        sampler = TransformRounds(dataset, 5, True, rank, 2, seed=3, lanes=2, block=1)
        with closing(BatchLoader(dataset, sampler)) as loader:
            epochs.append([[x for batch in loader for x in batch["x"].numpy().tolist()] for _ in range(2)])
    for epoch in zip(*epochs):
        assert sorted(epoch[0] + epoch[1]) == list(range(1, SHARDS * SAMPLES, 2))
        shards = [{x // SAMPLES for x in rows} for rows in epoch]
        assert len(shards[0] & shards[1]) <= 1, "each rank has the outputs of its own lane"
    assert epochs[0][0] != epochs[0][1]


def test_samples_that_are_not_streamed_take_no_part_in_fetching(store: ObjectStore, local: Path) -> None:
    one, two = Map(open_source(FOLDER, streaming=True), number_of), Map(open_source(local), number_of)
    blend = BlendedDataset([one, two], [0, 1])
    store.gets.clear()
    with closing(BatchLoader(blend, CyclicSampler(blend, 10))) as loader:
        assert [batch["x"].numpy()[0] for _, batch in zip(range(4), loader)] == [0, 10, 20, 30]
    assert not store.gets


def test_what_is_fetched_ahead_is_counted_and_told(store: ObjectStore, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "libai_data")
    source = open_source(FOLDER, streaming=True)
    dataset, first = Numbers(source), bytes_in_words(int(source.table.sizes[0]))

    def stats() -> dict[str, Any]:
        with closing(BatchLoader(dataset, CyclicSampler(dataset, 10))) as loader:
            batches = iter(loader)
            assert loader._streamed is not None and loader._streamed._ahead is not None
            wait([fetched for _, fetched in loader._streamed._ahead._held])
            found = loader.stats()
            next(batches)
            return found

    found, again = stats(), stats()
    size = int(source.table.sizes[: found["fetched_shards"]].sum())
    assert found["fetched_shards"] == again["cached_shards"] >= 3
    assert found["fetched_bytes"] == found["bytes_ahead"] == again["bytes_ahead"] == size
    assert found["fetched_bytes_per_second"] > 0 == found["cached_shards"] == again["fetched_bytes"]
    assert re.search(rf"first shard files of {FOLDER}, {first}, were fetched after \d+\.\d s", caplog.text)


def test_a_shard_that_a_batch_fetches_before_the_read_ahead_counts_as_fetched(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(FOLDER, streaming=True)
    is_read, hold = threading.Event(), source.hold

    def hold_after(shard: int) -> Any:
        if "ahead" in threading.current_thread().name:
            assert is_read.wait(stretched(60))
        return hold(shard)

    monkeypatch.setattr(source, "hold", hold_after)
    with closing(BatchLoader(Numbers(source), CyclicSampler(Numbers(source), 10))) as loader:
        next(iter(loader))
        is_read.set()
        assert loader._streamed is not None and loader._streamed._ahead is not None
        wait([fetched for _, fetched in loader._streamed._ahead._held])
        assert loader.stats()["fetched_shards"] >= 3 and loader.stats()["cached_shards"] == 0


def test_a_bar_shows_the_download_of_the_first_shards_and_then_lines_the_rate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "libai_data")
    terminal = StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(fetch_log, "_SECONDS_UNTIL_BAR", 0)
    monkeypatch.setattr(fetch_log, "_SECONDS_BETWEEN_LINES", -1)
    log = FetchLog(FOLDER, {0: 3000, 1: 1000}, lambda: 5000)
    for shard in (2, 0, 1):
        assert not log._bar.disable
        log.arrived(shard, 3000, shard != 1)
    assert log._bar.disable, "it has ended"
    assert f"first shard files of {FOLDER}: 100%" in terminal.getvalue()
    assert log.stats()["fetched_bytes"] == 6000 and log.stats()["cached_shards"] == 1
    line = rf"Streaming {FOLDER}: 2 shard files fetched \([\d.]+ .B/s\), 1 were in the cache, 5 KB ahead\."
    assert re.search(line, caplog.text)


def test_an_order_that_needs_all_shards_at_once_is_refused_if_the_cache_does_not_hold_them(store: ObjectStore) -> None:
    source = open_source(FOLDER, streaming=True)
    mapped = Map(source, number_of)
    for dataset in (mapped, BlendedDataset([mapped], [1]), RandomPart(mapped, 0, 0, 9)):
        sampler = CyclicSampler(dataset, 9, shuffle=not isinstance(dataset, RandomPart))
        with pytest.raises(ConfigError, match=r"too small to stream .*or give lanes.*no lanes: read these with shuf"):
            iter(BatchLoader(dataset, sampler))


@pytest.mark.slow
def test_workers_that_are_killed_while_they_fetch_or_read_change_no_sample(store: ObjectStore, local: Path) -> None:
    # The loader does not find the source, so that the workers fetch.
    dataset = Numbers(open_source(FOLDER, streaming=True), is_found=False)
    expected = sampler_of(Numbers(open_source(local)))
    store.faults = [STALL]
    with closing(BatchLoader(dataset, sampler_of(dataset), num_workers=2)) as loader:
        batches = iter(loader)

        def kill_while_fetching() -> None:
            store.sent.wait(stretched(60))
            for pid in worker_pids(loader):
                os.kill(pid, signal.SIGKILL)
            store.go_on.set()

        killer = Thread(target=kill_while_fetching)
        killer.start()
        for step, indices, batch in zip(range(len(dataset) // 10), expected, batches):
            assert batch["x"].numpy().tolist() == indices
            if step == 5:
                os.kill(worker_pids(loader)[0], signal.SIGKILL)
        killer.join()
    assert store.sent.is_set()


def test_a_shard_that_changed_or_went_is_named(store: ObjectStore, local: Path) -> None:
    source = open_source(FOLDER, streaming=True)
    store.put("shards/01.parquet", (local / "02.parquet").read_bytes())
    with pytest.raises(
        StorageError, match=rf"shards/01.parquet has changed since .*run 'libai-data index {FOLDER}' again"
    ):
        source[SAMPLES]
    store.delete("shards/03.parquet")
    with pytest.raises(
        ConfigError,
        match=rf"there is no {FOLDER}/03.parquet: it was removed since .*run 'libai-data index {FOLDER}' again",
    ):
        source[3 * SAMPLES]


@pytest.mark.parametrize("kind", ["mds", "litdata", *map(slowly, sorted(set(ENDINGS) - {"mds", "litdata"}))])
def test_shards_of_any_format_are_those_of_local_files_and_the_cache_stays_bounded(
    kind: str, object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    if kind == "array_record":
        pytest.importorskip("array_record")
    folder, expected = put_records(object_store, tmp_path, kind, 5)
    size = sum(path.stat().st_size for path in folder.iterdir())
    monkeypatch.setenv("LIBAI_DATA_CACHE_SIZE", str(size * 3 // 4))
    if kind in ("webdataset", "jsonl", "numpy"):
        with pytest.raises(ConfigError, match=rf"s3://bucket/shards/0\..*'libai-data index {FOLDER}'"):
            open_source(FOLDER, streaming=True)
        if kind == "numpy":
            assert index([FOLDER]) == 1
            assert re.search(rf"{FOLDER}/.* cannot be counted: .*count fewer shards at once", capsys.readouterr().err)
        assert index([FOLDER, "--at-once", "1"]) == 0, capsys.readouterr().err
        assert f"5 shards of {size - noted(folder)} bytes" in capsys.readouterr().out
    source = open_source(FOLDER, streaming=True)
    if kind in ("mds", "litdata"):
        assert same([source[0]], expected[:1])
        object_store.delete("shards/index.json")  # which is read once for all shards
    order = np.random.default_rng(0).permutation(len(expected))
    for start in range(0, len(order), 9):
        rows = order[start : start + 9]
        assert same(source.read_many(rows), [expected[row] for row in rows])
    files = list((tmp_path / "cache").rglob("*"))
    held = sum(path.stat().st_size for path in files if path.is_file() and "in_use" not in path.name)
    assert held <= size * 3 // 4 + size // 5, "one index may be larger than was promised, until another copy is made"
    assert not (tmp_path / "cache" / "indices").exists(), "indices go with their copies"


@pytest.mark.parametrize("has_table", [slowly(True), False])
def test_a_glob_streams_the_shards_that_it_names(has_table: bool, store: ObjectStore, local: Path) -> None:
    store.put("shards/deeper/02.parquet", (local / "07.parquet").read_bytes())
    if has_table:
        assert index([FOLDER]) == 0
    else:
        store.delete("shards/.libai_data_shards.npz")

    def shards(pattern: str) -> list[int]:
        source = open_source(f"{FOLDER}/{pattern}", streaming=True)
        return [source[row]["x"] // SAMPLES for row in range(0, len(source), SAMPLES)]

    assert shards("0[2-4].parquet") == [2, 3, 4]
    assert shards("*2.parquet") == [2]
    assert shards("**/*2.parquet") == [2, 7]
    assert shards("*/*.parquet") == [7]
    with pytest.raises(ConfigError, match=r"shards has no shards that match '\*.tar'; give"):
        shards("*.tar")


@pytest.mark.parametrize("kind", ["webdataset", slowly("parquet"), slowly("mds"), slowly("litdata"), slowly("jsonl")])
def test_shards_of_a_shared_file_system_are_streamed_too(
    kind: str, object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = put_records(object_store, tmp_path, kind, 4)
    size = sum(path.stat().st_size for path in folder.iterdir())
    monkeypatch.setenv("LIBAI_DATA_CACHE_SIZE", str(size * 3 // 4))
    assert index([f"file://{folder}"]) == 0
    source = open_source(f"file://{folder}/*.{ENDINGS[kind]}", streaming=True)
    assert same(source.read_many(range(len(source))), expected)
    assert list((tmp_path / "cache").rglob("*.*")), "shards are read from copies"
    with (folder / f"0.{ENDINGS[kind]}").open("ab") as file:
        file.write(b"more")
    source = open_source(f"file://{folder}", streaming=True)
    with pytest.raises(StorageError, match=rf"file://{folder}/0\..* has changed since"):
        source.read_many(range(len(source)))


def put_records(store: ObjectStore, tmp_path: Path, kind: str, shards: int) -> tuple[Path, list[Any]]:
    folder = tmp_path / "records"
    folder.mkdir()
    records = []
    for number in range(shards):
        records += write(kind, folder / f"{number}.{ENDINGS[kind]}", texts(20 + number, number))
    for path in folder.iterdir():
        if not path.is_dir():
            store.put(f"shards/{path.name}", path.read_bytes())
    return folder, records


def noted(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.json"))


@pytest.mark.parametrize("kind", ["webdataset", "jsonl", slowly("arrow"), slowly("numpy")])
def test_damaged_shards_are_named_by_their_address(
    kind: str, object_store: ObjectStore, tmp_path: Path, capsys: Any
) -> None:
    folder, _ = put_records(object_store, tmp_path, kind, 2)
    name = f"1.{ENDINGS[kind]}"
    whole = (folder / name).read_bytes()
    object_store.put(f"shards/{name}", b"[5]\n" + whole if kind == "jsonl" else whole[: len(whole) // 2])
    if kind == "jsonl":
        assert index([FOLDER]) == 0
        with pytest.raises(FormatError) as error:
            open_source(FOLDER, streaming=True)[20]
        said = str(error.value)
    else:
        assert index([FOLDER]) == 1
        said = capsys.readouterr().err
    assert f"{FOLDER}/{name}" in said and str(tmp_path) not in said, said


def test_what_cannot_be_streamed_is_refused_with_what_to_do(object_store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is on this machine.*open it without streaming, or give file:///"):
        open_source(tmp_path, streaming=True)
    with pytest.raises(ConfigError, match=rf"{FOLDER} has no shards that match '\*.tar'"):
        open_source(f"{FOLDER}/*.tar", streaming=True)
    with pytest.raises(ConfigError, match=r"one folder of shards, not \['s3://a', 's3://b'\]"):
        open_source(["s3://a", "s3://b"], streaming=True)
    with pytest.raises(ConfigError, match=r"'image_folder'.*libai-data convert"):
        open_source(FOLDER, "image_folder", streaming=True)
    with pytest.raises(ConfigError, match=rf"{FOLDER} has no shards"):
        open_source(FOLDER, streaming=True)
    with pytest.raises(ConfigError, match=r"is not a folder of shards: .*their folder"):
        open_source(object_store.put("shards/a.parquet", b"x"), streaming=True)
    object_store.put("shards/.libai_data_shards.npz", b"PK no table")
    with pytest.raises(FormatError, match=r"libai_data_shards.npz is not a table.*run 'libai-data index"):
        open_source(FOLDER, streaming=True)


@pytest.mark.parametrize(
    "column", [{"samples": -1}, {"samples": 1 << 62}, {"samples": 20.0}, {"sizes": -1}, {"versions": 1}, {"ends": -1}]
)
def test_a_table_with_wrong_numbers_is_refused(
    column: dict[str, Any], object_store: ObjectStore, tmp_path: Path
) -> None:
    put_records(object_store, tmp_path, "jsonl", 3)
    assert index([FOLDER, "--output", str(tmp_path / "table.npz")]) == 0
    table = dict(np.load(tmp_path / "table.npz"))
    ((name, value),) = column.items()
    np.savez(tmp_path / "table.npz", **{**table, name: np.full(len(table["samples"]), value)})
    object_store.put("shards/.libai_data_shards.npz", (tmp_path / "table.npz").read_bytes())
    with pytest.raises(FormatError, match=r"shards.npz is not a table of shards.*run 'libai-data index"):
        open_source(FOLDER, streaming=True)


@pytest.mark.slow
def test_opening_a_million_shards_takes_under_100_mb(tmp_path: Path) -> None:
    shards, random = 10**6, np.random.default_rng(0)
    names = np.char.mod("part-%07d.parquet", np.arange(shards)).astype("S20").tobytes()
    np.savez(
        tmp_path / TABLE,
        format=np.array(["1", "parquet"]),
        samples=np.full(shards, 10**4),
        sizes=np.full(shards, 8 << 20),
        sure=np.ones(shards, np.uint8),
        ends=20 * np.arange(1, shards + 1),
        data=np.frombuffer(names, np.int64),
        **{
            name: np.frombuffer(random.bytes(shards * digits // 2).hex().encode(), f"S{digits}")
            for name, digits in (("versions", 24), ("sums", 32))
        },
    )
    tracemalloc.start()
    try:
        source = open_source(f"file://{tmp_path}", streaming=True)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
    assert len(source) == 10**10 and source.table.names[12_345] == "part-0012345.parquet"
    saved = dict(np.load(tmp_path / TABLE))
    source.table.save(str(tmp_path / TABLE))
    for name, column in np.load(tmp_path / TABLE).items():
        np.testing.assert_array_equal(column, saved[name])


@pytest.mark.parametrize("output", ["", "nothing/table.npz"])
def test_a_table_that_cannot_be_written_is_refused_before_counting(
    output: str, object_store: ObjectStore, tmp_path: Path, capsys: Any
) -> None:
    object_store.put("shards/0.jsonl", b"{}")
    object_store.gets.clear()
    assert index([FOLDER, "--output", str(tmp_path / output)]) == 1
    assert "it must be a file in a folder that exists" in capsys.readouterr().err and not object_store.gets


def test_a_store_that_only_reads_gets_its_table_by_another_way_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("LIBAI_DATA_STORAGE_ATTEMPTS", "1")
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "0.jsonl").write_text("{}")
    with closing(WebFolder(folder)) as web:
        assert index([web.url]) == 1
        remedy = f"add --output FILE, and then copy FILE to {web.url}/{TABLE}"
        assert remedy in capsys.readouterr().err
        assert index([web.url, "--output", str(folder / TABLE)]) == 0
        assert list(open_source(web.url, streaming=True)) == [{}]


@pytest.mark.parametrize("records", ["-4", "1e400", "1" + 30 * "0"])
def test_a_manifest_with_wrong_numbers_is_refused(records: str, object_store: ObjectStore, tmp_path: Path) -> None:
    folder, _ = put_records(object_store, tmp_path, "jsonl", 1)
    entry = f'{{"records": {records}, "size": {(folder / "0.jsonl").stat().st_size}}}'
    object_store.put("shards/.libai_data_manifest.json", f'{{"shards": {{"0.jsonl": {entry}}}}}'.encode())
    with pytest.raises(FormatError, match=r"manifest.* remove"):
        open_source(FOLDER, streaming=True)


def test_what_convert_has_written_is_streamed_without_counting(object_store: ObjectStore, tmp_path: Path) -> None:
    records = write("jsonl", tmp_path / "a.jsonl", texts(50))
    arguments = ["--to", "webdataset", "--output", str(tmp_path / "out"), "--records-per-shard", "20"]
    assert convert([str(tmp_path / "a.jsonl"), *arguments]) == 0
    for path in (tmp_path / "out").iterdir():
        object_store.put(f"shards/{path.name}", path.read_bytes())
    object_store.gets.clear()
    source = open_source(FOLDER, streaming=True)
    assert [path for path in object_store.gets if path.endswith(".tar")] == []
    assert source.shard_lengths.tolist() == [16, 17, 17]
    assert source[49]["text.txt"].decode() == records[49]["text"]


@pytest.mark.parametrize("kind", ["arrow", "array_record", "webdataset", slowly("parquet")])
def test_samples_are_counted_by_footers_headers_and_indices_without_copies(
    kind: str, object_store: ObjectStore, tmp_path: Path
) -> None:
    if kind == "array_record":
        pytest.importorskip("array_record")
    folder, expected = put_records(object_store, tmp_path, kind, 3)
    if kind == "arrow":
        table = pyarrow.Table.from_pylist([{**expected[0], "text": text * 1000} for text in texts(90)])
        with pyarrow.OSFile(str(folder / "3.arrow"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=40)
        expected += table.to_pylist()
        object_store.put("shards/3.arrow", (folder / "3.arrow").read_bytes())
    if kind == "webdataset":
        listed = [{"url": f"{number}.tar", "nsamples": 20 + number} for number in range(3)]
        object_store.put("shards/index.json", json.dumps({"wids_version": 1, "shardlist": listed}).encode())
    source = open_source(FOLDER, streaming=True)
    assert source.shard_lengths.tolist() == [20, 21, 22, *[90] * (kind == "arrow")]
    assert not list((tmp_path / "cache").rglob(f"*.{ENDINGS[kind]}"))
    assert same(source.read_many(range(len(source))), expected)


def test_a_temporary_folder_that_cannot_be_written_is_not_taken_for_a_missing_shard(
    object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("array_record")
    put_records(object_store, tmp_path, "array_record", 1)
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"a temporary file cannot be written .*; set TMPDIR to a folder"):
        open_source(FOLDER, streaming=True)


@pytest.mark.parametrize("kind, ending", [("mds", "mds.zstd"), ("litdata", "zstd.bin")])
def test_compressed_shards_are_decompressed_into_the_cache(
    kind: str, ending: str, object_store: ObjectStore, tmp_path: Path
) -> None:
    expected, sizes = [], []
    for folder, compress in (("raw", False), ("packed", True)):
        (tmp_path / folder).mkdir()
        for number in range(3):
            path = tmp_path / folder / f"{number}.{ENDINGS[kind]}"
            records = WRITERS[kind](path, texts(20 + number, number), compress)
            if compress:
                expected += records
            else:
                sizes.append(path.stat().st_size)
    for path in (tmp_path / "packed").iterdir():
        object_store.put(f"shards/{path.name}", path.read_bytes())
    source = open_source(FOLDER, streaming=True)
    assert source.table.format == kind and source.table.sizes.tolist() == sizes
    assert same(source.read_many(range(len(source))), expected)
    with closing(BatchLoader(Map(source, lambda row: {"real": row["real"]}), CyclicSampler(source, 10))) as loader:
        next(iter(loader))
        assert loader._streamed is not None and loader._streamed._ahead is not None
        wait([fetched for _, fetched in loader._streamed._ahead._held])
        assert loader.stats()["fetched_shards"] == 0 < loader.stats()["cached_shards"]
    object_store.put(f"shards/1.{ending}", (tmp_path / "packed" / f"0.{ending}").read_bytes())
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(StorageError, match=rf"shards/1\.{ending} has changed"):
        pickle.loads(pickle.dumps(source)).read_many([20])


def test_a_cache_that_is_too_small_is_refused_at_the_start_with_the_size_that_is_enough(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_batch(size: int, **order: Any) -> list[int]:
        monkeypatch.setenv("LIBAI_DATA_CACHE_SIZE", str(size))
        dataset = Numbers(open_source(FOLDER, streaming=True))
        with closing(BatchLoader(dataset, CyclicSampler(dataset, 10, shuffle=True, **order))) as loader:
            return list(next(iter(loader))["x"].numpy().tolist())

    largest = int(open_source(FOLDER, streaming=True).table.sizes.max())
    with pytest.raises(ConfigError, match=rf"a shard of {largest} bytes.* at least {2 * largest} bytes"):
        first_batch(largest - 1)
    with pytest.raises(ConfigError, match=r"too small to stream .*or give lanes"):
        first_batch(8 * largest)
    lanes = {"lanes": 4, "block": 2}
    with pytest.raises(ConfigError, match=r"too small to stream .*fewer lanes") as error:
        first_batch(8 * largest, **lanes)
    found = re.search(r"to at least (\d+) bytes", str(error.value))
    assert found is not None
    assert first_batch(int(found[1]), **lanes)


class OneWorkerAhead(Numbers):
    """A worker reads index 40 only after the other worker has read all that may be read ahead."""

    def __init__(self, source: Any, sign: Path) -> None:
        super().__init__(source)
        self._sign = sign

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        while number == 40 and get_worker_info() is not None and not self._sign.exists():
            time.sleep(0.01)
        found = super().__getitem__(number)
        if number == 89 and get_worker_info() is not None:  # of the last of the 4 batches after that of index 40
            self._sign.touch()
        return found


def test_a_fetched_shard_is_no_change_of_the_dataset(store: ObjectStore) -> None:
    source = open_source(FOLDER, streaming=True)
    dataset = Numbers(source)
    copy = WorkersCopy(dataset)
    assert dataset[0]["x"] == 0 and source.fetched == {0}
    assert copy.is_current(), "workers would be started again, after a warning"


def _always(sample: Any) -> bool:
    return True


@pytest.mark.parametrize("trainer_reads", [False, True])
def test_processes_that_are_idle_close_shards_if_a_worker_has_no_room(
    store: ObjectStore, trainer_reads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = int(open_source(FOLDER, streaming=True).table.sizes.max())
    monkeypatch.setenv("LIBAI_DATA_CACHE_SIZE", str(2 * largest + 1))
    dataset: Any = OneWorkerAhead(open_source(FOLDER, streaming=True), tmp_path / "sign")
    dataset = FilteredDataset(dataset, _always) if trainer_reads else dataset
    with closing(BatchLoader(dataset, CyclicSampler(dataset, 10), num_workers=2)) as loader:
        rows = [batch["x"].numpy().tolist() for _, batch in zip(range(12), loader)]
    assert rows == np.arange(120).reshape(12, 10).tolist()


def _of_half(order: Any) -> np.ndarray:
    """The shards of the first of two lanes."""
    return np.unique([use.shard for use, _ in zip(order.shard_uses(range(5), 10), range(SHARDS))])


def test_the_plan_shows_what_each_node_fetches_and_keeps(store: ObjectStore) -> None:
    source = open_source(FOLDER, streaming=True)
    sizes = source.table.sizes
    dataset = Numbers(source)
    sampler = CyclicSampler(dataset, 10, shuffle=True, seed=3, lanes=2, block=1)
    title, *lines = streaming_report(dataset, sampler, ParallelMesh(2, 1, 1, num_nodes=2), 5, "every_rank")[1:]
    assert title.startswith(f"Streaming {FOLDER}: 10 shard files, {bytes_in_words(int(sizes.sum()))}.")
    shown = [" ".join(line.split()) for line in lines]
    half = bytes_in_words(int(sizes[:5].sum()))
    batches = 2 * SAMPLES // 10  # in which a node reads a shard
    each = bytes_in_words(int(sizes[0]) / batches)
    enough = 2 * int(np.sort(sizes[_of_half(sampler.order)])[-2:].sum()) + 1  # the end of a block, and the next one
    assert shown[2] == f"0 5 {half} {half} {enough:,} bytes {each}"
    blend = halves_of(dataset)
    stream = CyclicSampler(blend, 10, shuffle=True, seed=3, lanes=2, block=1)
    nodes = streaming_report(blend, stream, ParallelMesh(2, 1, 1, num_nodes=2), 5, "every_rank")[4:-1]
    # Nodes whose numbers are equal share a row; the sizes of the files decide.
    assert {line.split()[1] for line in nodes} == {"6"}, "three of the five shards of each half"
    for keep in (_is_odd, np.ones(len(dataset), bool)):
        kept = FilteredDataset(dataset, keep)
        stream = CyclicSampler(kept, 10, shuffle=True, seed=3, lanes=2, block=1)
        row, last = streaming_report(kept, stream, ParallelMesh(2, 1, 1, num_nodes=2), 5, "every_rank")[4:][-2:]
        assert (row.split()[1], row.split()[-1], "not known" in last) == ("5", "-", True)
    assert f"a cache of {bytes_in_words(int(source.storage.size))} (" in shown[-1]
    assert bytes_a_batch([ShardUse(0, 0, 3), ShardUse(1, 2, 5), ShardUse(2, 6, 7)], sizes, int(sizes[0])) == np.inf
    plain = CyclicSampler(dataset, 10)
    assert "Without lanes" in streaming_report(dataset, plain, ParallelMesh(1, 1, 1), 5, "node")[1]
    assert streaming_report(object(), plain, ParallelMesh(1, 1, 1), 5, "node") == []


def test_the_cache_that_the_plan_shows_has_room_for_the_largest_shard_on_every_node(tmp_path: Path) -> None:
    for number, width in enumerate([100] * 4 + [2000] * 4):
        np.save(tmp_path / f"{number}.npy", np.zeros((10, width)))
    assert index([f"file://{tmp_path}"]) == 0
    source = open_source(f"file://{tmp_path}", streaming=True)
    dataset = Numbers(source)
    stream = CyclicSampler(dataset, 10, lanes=2, block=1)  # the first lane has the small shards
    *_, small, large, _ = streaming_report(dataset, stream, ParallelMesh(2, 1, 1, num_nodes=2), 5, "every_rank")
    largest = int(source.table.sizes.max())
    assert small.split()[0] == "0" and f" {2 * largest + 1:,} bytes" in small
    assert large.split()[0] == "1" and f" {2 * 2 * largest + 1:,} bytes" in large


def test_the_plan_counts_all_shards_for_each_node_if_an_epoch_needs_the_lengths_of_all_samples(
    store: ObjectStore,
) -> None:
    dataset = Numbers(open_source(FOLDER, streaming=True))
    for keep, shards in ((_is_odd, SHARDS), (np.ones(len(dataset), bool), SHARDS // 2)):
        kept = FilteredDataset(dataset, keep)
        stream = TransformRounds(kept, 10, shuffle=True, seed=3, lanes=2, block=1)
        *_, row, _ = streaming_report(kept, stream, ParallelMesh(2, 1, 1, num_nodes=2), 5, "every_rank")
        assert row.split()[1] == str(shards)


def test_a_cache_that_is_deleted_is_filled_again(store: ObjectStore, tmp_path: Path) -> None:
    source = open_source(FOLDER, streaming=True)
    held = source.hold(2)
    for shard in range(4):
        shutil.rmtree(tmp_path / "streamed")
        assert source[shard * SAMPLES + 1]["x"] == shard * SAMPLES + 1
        assert source[1]["x"] == 1, "what is mapped stays readable"
    deletions = ["05.parquet", "06.parquet"]

    def delete_while_it_is_fetched(path: str) -> None:
        if deletions and deletions[0] in path:
            deletions.pop(0)
            shutil.rmtree(tmp_path / "streamed")

    store.before_get = delete_while_it_is_fetched
    assert [source[shard * SAMPLES]["x"] for shard in (5, 6)] == [5 * SAMPLES, 6 * SAMPLES]
    assert not deletions
    assert source[1]["x"] == 1
    key = source._key(source.table.remote(FOLDER, 0))
    assert is_used(source.storage.directory, key), "others see that it is in use"
    held.close()


@pytest.mark.parametrize("kilobytes", [24, 28, 32])
def test_a_full_disk_is_named_with_the_shard(
    kilobytes: int, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", kilobytes) as folder:
        monkeypatch.setenv("LIBAI_DATA_CACHE_DIR", str(folder))
        source = open_source(FOLDER, streaming=True)
        with pytest.raises(StorageError, match=rf"{FOLDER}/0\d.parquet .*make room on the disk"):
            for shard in range(4):
                source[shard * SAMPLES]


@pytest.mark.parametrize("fault", [SILENT, slowly(STALL)])
def test_a_silent_store_is_in_the_log_after_one_silence_and_ends_the_pass_after_its_attempts(
    fault: str, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote, "_SECONDS_OF_SILENCE", stretched(0.3))
    dataset = Numbers(open_source(FOLDER, streaming=True))
    store.faults = [fault] * 100
    error = rf"{FOLDER}/00.parquet could not be fetched in 3 attempts.*imeout"
    with closing(BatchLoader(dataset, CyclicSampler(dataset, 10))) as loader, pytest.raises(SampleError, match=error):
        next(iter(loader))
    # A busy server may not have read each request when the loader gives it up.
    assert fetched(store)["00.parquet"] <= 3, "whoever waits for a shard that cannot be fetched does not ask again"
    assert re.search(rf"{FOLDER}/00.parquet could not be fetched \(.*imeout.*attempt 2 of 3", caplog.text)


def test_of_copies_that_nobody_uses_that_with_the_farthest_next_use_goes(tmp_path: Path) -> None:
    """The farthest next use needs fewer fetches than the least recent use, on an order that comes again."""
    order = [number for _ in range(4) for number in range(5)]

    def fetches(farthest: bool) -> int:
        cache, made = LocalCache(tmp_path / str(farthest), 3 * 100), []
        for place, number in enumerate(order):

            def make(part: Path, number: int = number) -> None:
                made.append(number)
                part.write_bytes(bytes(100))

            _, release = cache.hold(f"{number:024x}", "shard", 100, make)
            release()
            if farthest:
                next_use = order.index(number, place + 1) if number in order[place + 1 :] else 10**6
                cache.expect(f"{number:024x}", 10**18 - 1000 * next_use)
        return len(made)

    assert fetches(farthest=False) == 20, "what was used longest ago is what comes next"
    assert fetches(farthest=True) == least_fetched([{number} for number in order], np.ones(5), 3, len(order))


def test_many_copies_are_made_without_a_look_at_all_others_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans: list[LocalCache] = []
    entries = LocalCache._entries

    def counted(cache: LocalCache) -> Any:
        scans.append(cache)
        return entries(cache)

    def make(part: Path) -> None:
        part.write_bytes(bytes(100))

    monkeypatch.setattr(LocalCache, "_entries", counted)
    for size, numbers in ((100_000, range(100)), (1000, range(100, 103))):
        for number in numbers:
            LocalCache(tmp_path, size).hold(f"{number:024x}", "shard", 100, make)[1]()
    assert len(scans) <= 4
    assert sum(path.stat().st_size for path in tmp_path.glob("*-shard")) <= 1000


class Shards:
    """What is held of shards of 100 bytes."""

    def __init__(self) -> None:
        self.fetched: list[int] = []
        self.held: Counter[int] = Counter()
        self.most = 0
        self.changed = Event()

    def hold(self, shard: int) -> Any:
        self.fetched.append(shard)
        self.held[shard] += 1
        self.most = max(self.most, sum(self.held.values()))
        self.changed.set()
        return lambda: self.held.update({shard: -self.held[shard]})


def test_reading_ahead_stays_within_its_bytes_and_follows_the_batches() -> None:
    shards = Shards()

    def uses() -> Iterator[ShardUse]:
        number = 0
        while True:
            yield ShardUse(number % 50, number, number + 1)
            number += 1

    done: list[tuple[int, int]] = []
    ahead = ReadAhead(uses(), shards.hold, np.full(50, 100), 400, lambda shard, batch: done.append((shard, batch)))
    due = 0
    for batch in range(20):
        if batch >= due:  # No other batch changes anything.
            due = ahead.reached(batch)
        while len(shards.fetched) < batch + 3:
            shards.changed.wait(1)
            shards.changed.clear()
    assert sorted(shards.fetched)[:20] == list(range(20))
    assert shards.most <= 6, "four within the budget, and those that are just let go"
    ahead.close()
    assert {shard for shard, _ in done} <= set(range(20))


def test_a_shard_that_is_used_again_while_it_is_held_is_not_asked_for_again() -> None:
    shards = Shards()
    uses = (ShardUse(number % 3, number, number) for number in count())
    done: list[tuple[int, int]] = []
    ahead = ReadAhead(uses, shards.hold, np.full(3, 100), 300, lambda shard, batch: done.append((shard, batch)))
    for batch in range(20):
        wait([fetched for _, fetched in ahead._held])
        ahead.reached(batch)
    assert sorted(shards.fetched) == [0, 1, 2] and not done
    ahead.close()
    assert not any(shards.held.values()), "each is let go of at the end"


def test_shards_stay_open_from_pass_to_pass_unless_workers_would_hold_them_too(store: ObjectStore) -> None:
    source = open_source(FOLDER, streaming=True)
    shard = source.identity, 0

    def opened_by_two_passes(**workers: Any) -> list[Any]:
        with closing(BatchLoader(Numbers(source), CyclicSampler(source, 10), **workers)) as loader:
            return [(next(iter(loader)), source.opened, source.opened.get(shard))[1:] for _ in range(2)]

    [(first, opened), again] = opened_by_two_passes()
    assert opened is not None and again == (first, opened)
    assert first.get(shard) is None, "a closed loader leaves the room in the cache to others"
    assert opened_by_two_passes(num_workers=1, worker_type="thread")[1][0] is first
    assert all(each[0] is not first for each in opened_by_two_passes(num_workers=1))


def test_later_epochs_open_no_shard_again_if_the_cache_has_room_for_all(
    store: ObjectStore, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBAI_DATA_CACHE_SIZE", str(3 * SHARDS * (local / "00.parquet").stat().st_size))
    source = open_source(FOLDER, streaming=True)
    opened, open_it = list[int](), source._opened

    def noted(number: int) -> Any:
        opened.append(number)
        return open_it(number)

    monkeypatch.setattr(source, "_opened", noted)
    with closing(BatchLoader(Numbers(source), sampler_of(Numbers(source)))) as loader:
        for _ in zip(range(3 * SHARDS * SAMPLES // 10), loader):
            pass
    assert sorted(opened) == list(range(SHARDS))


def test_a_read_ahead_that_another_thread_closes_while_it_fetches_more_releases_all() -> None:
    released: Counter[int] = Counter()
    held: Counter[int] = Counter()

    def hold(shard: int) -> Any:
        held[shard] += 1
        return lambda: released.update([shard])

    def uses() -> Iterator[ShardUse]:
        yield from (ShardUse(number, number, number) for number in range(3))
        closer.start()
        closer.join(0.2)
        yield from (ShardUse(number % 3, number, number) for number in count(3))

    ahead = ReadAhead(uses(), hold, np.array([5, 5, 5]), 10, lambda *_: None)
    closer = Thread(target=ahead.close)
    ahead.reached(2)
    closer.join()
    ahead.reached(3)
    ahead._pool.shutdown()
    assert held == released
