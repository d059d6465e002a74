"""Streamed shards on several ranks: the batches of local files on one, with a cache that holds a part of them."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libai_data.commands.index import main as index
from libai_data.data.samplers import CyclicSampler
from libai_data.data.sources import open_source
from libai_data.launch.launcher import free_port
from tests.data.sources.object_store import BUCKET, STALL, ObjectStore
from tests.distributed.jobs import Job, start_by_launcher
from tests.distributed.launcher import launch_ranks
from tests.distributed.namespaces import Node, two_nodes, why_not
from tests.distributed.processes import command_of, ranks_environment
from tests.distributed.scripts.stream_and_resume import BATCH, ORDER, Records, digest_of, stream
from tests.distributed.scripts.stream_shards import BATCHES, loader_of
from tests.distributed.test_two_nodes import start_on
from tests.properties import slowly

pyarrow = pytest.importorskip("pyarrow")
SCRIPT = Path(__file__).parent / "scripts" / "stream_shards.py"
RESUMING = SCRIPT.with_name("stream_and_resume.py")
FOLDER = f"s3://{BUCKET}/shards"
SHARDS, EPOCH, WATCHDOG = 20, 20, 120.0
SECONDS_TO_END = 20.0
"""Less than a silent store is waited for."""


def write_shards(folder: Path) -> list[Path]:
    from pyarrow import parquet

    folder.mkdir()
    paths = [folder / f"{shard:02}.parquet" for shard in range(SHARDS)]
    for shard, path in enumerate(paths):
        rows = [{"x": 8 * shard + row, "noise": np.random.default_rng(8 * shard + row).bytes(900)} for row in range(8)]
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, compression="none")
    return paths


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """A server with shards, and a cache for most of them."""
    import s3fs

    store = ObjectStore()
    s3fs.S3FileSystem.clear_instance_cache()
    for name, value in {**store.environment(), "LIBAI_DATA_CACHE_DIR": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    paths = write_shards(tmp_path / "local")
    for path in paths:
        store.put(f"shards/{path.name}", path.read_bytes())
    assert index([FOLDER]) == 0
    store.gets.clear()
    monkeypatch.setenv("LIBAI_DATA_CACHE_SIZE", str(18 * paths[0].stat().st_size))
    yield store
    store.close()


def sampler_of(source: Any) -> CyclicSampler:
    return CyclicSampler(Records(source), BATCH, **ORDER)


def indices_of(sampler: CyclicSampler, step: int) -> list[int]:
    batch = sampler.batch_at(BATCH * step)
    assert batch is not None
    return list(batch.indices.tolist())


def expected_digests(local: Path, steps: int) -> list[str]:
    """Of each step, read from local files."""
    records = Records(open_source(local))
    found = []
    for step in range(steps):
        samples = [records[row] for row in indices_of(sampler_of(records.source), step)]
        found.append(digest_of(*(np.stack([sample[name] for sample in samples]) for name in ("x", "noise"))))
    return found


def check_taken(folder: Path, steps: int) -> None:
    """Each step was taken, and each time with the bytes of the local files."""
    expected, taken = expected_digests(folder / "local", steps), set()
    for line in (folder / "taken").read_text().splitlines():
        step, digest = line.split()
        assert digest == expected[int(step)], f"step {step}"
        taken.add(int(step))
    assert taken == set(range(steps))


WHOLE_CACHE = 100
LANED = "blend-lanes,filter-lanes,packer-lanes,filter-epochs,packer-epochs"
ALL_KINDS = f"plain,{LANED},blend,filter,packer"


@pytest.mark.parametrize(
    ("ranks", "meshes", "readers", "kinds", "cached"),
    [
        (2, "2", "every_rank", "packer-epochs", 18),
        slowly(2, "2,1", "every_rank,node", "plain,packer-lanes,filter-epochs", 18),
        slowly(4, "2", "every_rank,node,rank0", "plain", 18),
        slowly(2, "2", "node,rank0", ALL_KINDS, WHOLE_CACHE),
        slowly(4, "4", "every_rank,node", "blend-lanes,filter,packer-epochs", WHOLE_CACHE),
    ],
)
def test_ranks_stream_the_batches_of_local_files_and_resume(
    ranks: int,
    meshes: str,
    readers: str,
    kinds: str,
    cached: int,
    store: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also through blends, filters and packers: the rows of local files on a single rank."""
    monkeypatch.setenv("LIBAI_DATA_CACHE_SIZE", str(cached * (tmp_path / "local" / "00.parquet").stat().st_size))
    # Ranks of a pool would have the environment, and so the store, of the test that started them.
    arguments = FOLDER, str(tmp_path / "taken.json"), meshes, readers, kinds
    result = launch_ranks(SCRIPT, ranks, *arguments, timeout=200, alone=True)
    assert result.returncode == 0, result.output
    found = json.loads((tmp_path / "taken.json").read_text())
    assert len(found) == (meshes.count(",") + 1) * (readers.count(",") + 1) * (kinds.count(",") + 1)
    for case, taken in found.items():
        check_rows(case, taken, tmp_path)
    if cached == WHOLE_CACHE:
        fetched = Counter(path for path in store.gets if path.endswith(".parquet"))
        assert set(fetched.values()) == {1}, "of all ranks of a node that need a shard, one fetches it for all"


def check_rows(case: str, taken: Any, folder: Path) -> None:
    """The rows are those of local files in one process."""
    with closing(loader_of(case.split()[-1], open_source(folder / "local"))) as loader:
        assert taken == [
            {name: field.numpy().tolist() for name, field in batch.items()} for batch in islice(loader, BATCHES)
        ], case


def kill(folder: Path, rank: int, worker: int | None) -> bool:
    """Kill a rank or one of its workers; False if it has ended, as an epoch has begun since the last step."""
    pids = json.loads((folder / f"pids-{rank}").read_text())
    with suppress(ProcessLookupError):
        os.kill(pids[0 if worker is None else 1 + worker], signal.SIGKILL)
        return True
    return False


KILLS = 5
TWO_JOBS = [
    [(2, "every_rank", 2), (4, "node", 1)],
    [(4, "rank0", 2), (1, "every_rank", 2)],
    [(1, "node", 1), (2, "rank0", 1)],
    [(4, "every_rank", 1), (2, "node", 2)],
    [(2, "every_rank", 1), (4, "node", 2)],
]


@pytest.mark.slow
@pytest.mark.parametrize("jobs", TWO_JOBS)
def test_processes_that_are_killed_while_they_stream_change_no_byte(
    jobs: list[tuple[int, str, int]], store: ObjectStore, tmp_path: Path
) -> None:
    """Each job loses workers, and then a rank, half a shard in; the next one is on another mesh."""
    draws = random.Random(str(jobs))
    step = 0

    def went_on() -> bool:
        pids = [pid for path in tmp_path.glob("pids-*") for pid in json.loads(path.read_text())]
        return steps_taken(tmp_path) > step + 1 and all(map(command_of, pids))

    store.before_get = lambda path: time.sleep(0.005)
    for ranks, readers, workers in jobs:
        for path in tmp_path.glob("pids-*"):
            path.unlink()
        with Job() as job:
            arguments = (FOLDER, str(tmp_path), readers, str(workers), str(10**6))
            start_by_launcher(job, RESUMING, ranks, *arguments)
            left = KILLS
            while left:
                job.wait_for(went_on, "step")
                step = steps_taken(tmp_path)
                store.sent.clear()
                store.go_on.clear()
                store.faults = [STALL]
                job.wait_for(store.sent.is_set, "half of a shard")
                rank = draws.randrange(ranks) if readers == "every_rank" or left == 1 else 0
                left -= kill(tmp_path, rank, draws.randrange(workers) if left > 1 else None)
                store.go_on.set()
            ended = job.wait(WATCHDOG)
        assert not ended.left and all(ended.codes), ended.output
        step = steps_taken(tmp_path)
    stream(FOLDER, tmp_path, "every_rank", 0, step + EPOCH, rank=0)
    check_taken(tmp_path, step + EPOCH)


def steps_taken(folder: Path) -> int:
    """How many steps the state says."""
    with suppress(FileNotFoundError):
        return int(json.loads((folder / "state.json").read_text())[0])
    return 0


class TwoNodes:
    """A web server with shards on the first of two nodes, and jobs on both, each with a cache for some shards."""

    def __init__(self, nodes: list[Node], servers: Job, folder: Path) -> None:
        self.nodes, self.servers, self.folder = nodes, servers, folder
        self.size = write_shards(folder / "local")[0].stat().st_size
        serve = [sys.executable, "-u", "-m", "http.server", "--directory", str(folder / "local"), "--bind"]
        port = free_port()
        table = ["-m", "libai_data", "index", "--output", str(folder / "local" / ".libai_data_shards.npz")]
        self.server = servers.start(nodes[0].command(*serve, nodes[0].address, str(port)), dict(os.environ))
        self.address = f"http://{nodes[0].address}:{port}"
        servers.wait_for(lambda: "Serving" in servers.outputs()[0], "server")
        subprocess.run(nodes[0].command(sys.executable, *table, self.address), check=True, env=ranks_environment())

    def fetched(self, begun: int) -> list[str]:
        """The shards that the server has sent since its log had `begun` characters."""
        return re.findall(r'"GET /(\d+)\.parquet HTTP/1.1" 200', self.servers.outputs()[0][begun:])

    def start(self, job: Job, ranks: int, readers: str, steps: int, cached: int) -> None:
        """Start the ranks of each node, with a cache for so many shards."""
        self.run(job, ranks, cached, RESUMING, self.address, str(self.folder), readers, "1", str(steps))

    def run(self, job: Job, ranks: int, cached: int, script: Path, *arguments: str) -> None:
        """Start a script on the ranks of each node, with a cache for so many shards."""

        def cache_of(node: int) -> dict[str, str]:
            size = str(cached * self.size)
            return {"LIBAI_DATA_CACHE_DIR": str(self.folder / f"cache{node}"), "LIBAI_DATA_CACHE_SIZE": size}

        start_on(job, self.nodes, script, *arguments, ranks=ranks, env_of=cache_of)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[TwoNodes]:
    with two_nodes() as nodes, Job() as servers:
        yield TwoNodes(nodes, servers, tmp_path)


on_two_nodes = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


@pytest.mark.slow
@on_two_nodes
def test_two_nodes_stream_the_batches_of_local_files_and_share_the_shards(served: TwoNodes, tmp_path: Path) -> None:
    begun, steps = len(served.servers.outputs()[0]), 2 * EPOCH
    with Job() as job:
        served.start(job, 1, "node", steps, cached=36)
        ended = job.wait(WATCHDOG)
        assert ended.codes == [0, 0], ended.output
    check_taken(tmp_path, steps)
    assert len(served.fetched(begun)) <= 1.1 * SHARDS, "a node fetches its own shards, once, and keeps them"


@pytest.mark.slow
@on_two_nodes
@pytest.mark.parametrize(
    ("ranks", "readers", "kinds", "cached"),
    [
        (1, "every_rank", LANED, 36),
        (2, "node", LANED, 36),
        (2, "every_rank", "measured-lanes", WHOLE_CACHE),
        (2, "node", "filter-lanes", WHOLE_CACHE),
    ],
)
def test_two_nodes_stream_blends_filters_and_packers_in_lanes_as_one_process_reads_local_files(
    ranks: int, readers: str, kinds: str, cached: int, served: TwoNodes, tmp_path: Path
) -> None:
    """If no lengths are known, a node finds the outputs of its lanes by reading their samples."""
    begun, found = len(served.servers.outputs()[0]), tmp_path / "taken.json"
    with Job() as job:
        served.run(job, ranks, cached, SCRIPT, served.address, str(found), str(2 * ranks), readers, kinds)
        ended = job.wait(WATCHDOG)
    assert ended.codes == [0, 0], ended.output
    taken = json.loads(found.read_text())
    assert len(taken) == kinds.count(",") + 1
    for case, rows in taken.items():
        check_rows(case, rows, tmp_path)
    if cached == WHOLE_CACHE:
        gets = served.fetched(begun)
        assert set(gets) == {f"{shard:02}" for shard in range(SHARDS)}
        assert len(gets) <= SHARDS + 1, "two nodes share a shard only at the end of a span"


@pytest.mark.slow
@on_two_nodes
@pytest.mark.parametrize("rank", [2, 0])
def test_the_first_rank_of_a_node_that_is_killed_while_it_streams_ends_both_nodes(
    rank: int, served: TwoNodes, tmp_path: Path
) -> None:
    """It reads for its node. The store falls silent before it has given all shards, so that one is being fetched."""
    with Job() as job:
        served.start(job, 2, "node", 10**6, cached=14)
        job.wait_for(lambda: steps_taken(tmp_path) > 0, "step")
        os.kill(served.server.pid, signal.SIGSTOP)
        try:
            job.wait_for(lambda: list(tmp_path.glob(f"cache{rank // 2}/files/*.room")), "fetch")
            assert kill(tmp_path, rank, None)
            ended = job.wait(SECONDS_TO_END)
        finally:
            os.kill(served.server.pid, signal.SIGCONT)
    assert all(ended.codes) and not ended.left, ended.output
    # Another node cannot tell a rank that is gone from a network that is.
    assert re.search(rf"rank \d ends: rank {rank}\b.* is gone", ended.output), ended.output
    steps = steps_taken(tmp_path) + EPOCH
    with Job() as job:
        served.start(job, 1, "every_rank", steps, cached=36)
        ended = job.wait(WATCHDOG)
    assert ended.codes == [0, 0], ended.output
    check_taken(tmp_path, steps)
