"""Descriptors and memory do not grow with the number of shards, whatever the format."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from libai_data.data.sources.last_used import LastUsed
from tests.data.sources.record_files import ENDINGS, WRITERS, texts

SHARDS, DESCRIPTORS = 120, 64
MIB = 1 << 20
FILES, GROUPS, GROUP_BYTES, CACHE_BYTES = 30, 2, 4 * MIB, 8 * MIB

# Opens a source of many shards, reads it at random, here and in a spawned worker, and tells what it has read.
READ_ALL = """
import os, resource, sys
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
import numpy as np
from libai_data.loader.shipping import ship, unship
from libai_data.data.sources import IndexedSource, open_source

def opened(kind, path):
    if kind == "indexed":
        return [IndexedSource(f"{path}/{name[:-4]}") for name in sorted(os.listdir(path)) if name.endswith(".idx")]
    return open_source(f"{path}/0*", kind)

for entry in sys.argv[3:]:
    kind, _, path = entry.partition("=")
    source = opened(kind, path)
    shipment = ship(source)
    for here in (source, unship(shipment.descriptor)):
        order = np.random.default_rng(0).permutation(len(here))[:500]
        read = [here[int(index)] for index in order]
        assert len(read) == len(order) and all(len(record) for record in read)
    print(kind, len(source), len(os.listdir("/proc/self/fd")), flush=True)
"""


def many_shards(folder: Path, kind: str, shards: int) -> Path:
    """One shard under many names."""
    (folder / kind).mkdir()
    if kind == "indexed":
        from libai_data.data.sources import IndexedWriter

        with IndexedWriter(folder / "one") as writer:
            writer.add_document([[1, 2, 3]])
        endings = [".bin", ".idx"]
    else:
        WRITERS[kind](folder / f"one.{ENDINGS[kind]}", texts(3))
        endings = [f".{ENDINGS[kind]}"]
    for number in range(shards):
        for ending in endings:
            os.link(folder / f"one{ending}", folder / kind / f"{number:05d}{ending}")
    index = folder / "index.json"
    if index.exists():
        content, key = json.loads(index.read_text()), "shards" if kind == "mds" else "chunks"
        only = json.dumps(content[key][0])
        content[key] = [json.loads(only.replace('"one.', f'"{number:05d}.')) for number in range(shards)]
        (folder / kind / "index.json").write_text(json.dumps(content))
        index.unlink()
    return folder / kind


def test_many_shards_of_any_format_are_read_with_few_descriptors(tmp_path: Path, repository: Path) -> None:
    pytest.importorskip("array_record")
    pytest.importorskip("pyarrow")
    kinds = [*ENDINGS, "indexed"]
    entries = [f"{kind}={many_shards(tmp_path, kind, SHARDS)}" for kind in kinds]
    command = [sys.executable, "-c", READ_ALL, "", str(DESCRIPTORS), *entries]
    done = subprocess.run(command, cwd=repository, stdout=subprocess.PIPE, text=True, check=True)
    found = {line.split()[0]: int(line.split()[2]) for line in done.stdout.splitlines()}
    assert set(found) == set(kinds) and max(found.values()) < DESCRIPTORS / 2, found


READ_DECODED = """
import sys
import numpy as np
from libai_data.data.sources.opening import SOURCES

def resident():
    with open("/proc/self/status") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(("RssAnon:", "RssFile:"))) << 10

for entry in sys.argv[2:]:
    kind, _, path = entry.partition("=")
    limit = {} if kind == "array_record" else {"cache_bytes": int(sys.argv[1])}
    source = SOURCES[kind](f"{path}/*", **limit)
    source[0]  # What the package loads counts for nothing.
    before, most = resident(), 0
    for index in np.random.default_rng(0).permutation(len(source))[:120].tolist():
        assert source[index]
        most = max(most, resident())
    print(kind, most - before, flush=True)
"""


def large_groups(folder: Path, kind: str) -> Path:
    """Files of groups of records that decompress to `GROUP_BYTES`."""
    import pyarrow
    from pyarrow import parquet

    records = [bytes([number]) * (GROUP_BYTES // 4) for number in range(4 * GROUPS)]
    table = pyarrow.table({"x": records})
    (folder / kind).mkdir()
    path = folder / f"one.{ENDINGS[kind]}"
    if kind == "array_record":
        WRITERS[kind](path, [record.decode() for record in records], "group_size:4")
    elif kind == "parquet":
        parquet.write_table(table, path, row_group_size=4)
    else:
        options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
        with pyarrow.OSFile(str(path), "wb") as file:
            writer = pyarrow.ipc.new_stream(file, table.schema, options=options)
            writer.write_table(table, max_chunksize=4)
            writer.close()
    for number in range(FILES):
        os.link(path, folder / kind / f"{number:02d}{path.suffix}")
    return folder / kind


def test_cache_bytes_bounds_what_all_files_of_a_source_keep_decoded(tmp_path: Path, repository: Path) -> None:
    pytest.importorskip("pyarrow")
    # Readers of ArrayRecord files stay open; they must keep nothing decoded.
    kinds = ["parquet", "arrow", *(["array_record"] if find_spec("array_record") else [])]
    entries = [f"{kind}={large_groups(tmp_path, kind)}" for kind in kinds]
    command = [sys.executable, "-c", READ_DECODED, str(CACHE_BYTES), *entries]
    # The pool of pyarrow 21, which Python 3.9 has, keeps what is freed; what counts here is what is not freed.
    env = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"}
    done = subprocess.run(command, cwd=repository, env=env, stdout=subprocess.PIPE, text=True, check=True)
    grown = {line.split()[0]: int(line.split()[1]) / MIB for line in done.stdout.splitlines()}
    # Beside what is kept, one group is decoded; one of each file would be more than twice as much.
    allowed = (CACHE_BYTES + 12 * GROUP_BYTES) / MIB
    assert set(grown) == set(kinds) and max(grown.values()) < allowed < FILES * GROUP_BYTES / MIB / 2, grown


def test_threads_share_what_was_used_last_within_its_limit() -> None:
    kept = LastUsed(100)

    def use(seed: int) -> None:
        for key in np.random.default_rng(seed).integers(0, 20, 5000).tolist():
            assert (kept.get(key) or kept.put(key, f"value {key}", 30)) == f"value {key}"

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, range(4)))
    assert sum(kept.get(key) is not None for key in range(20)) == 3


def test_no_more_values_are_kept_than_a_process_may_have_memory_maps() -> None:
    kept, allowed = LastUsed(1 << 60), int(Path("/proc/sys/vm/max_map_count").read_text())
    for key in range(allowed):
        kept.put(key, "mapped", 1)
    assert len(kept._values) < allowed / 2 and kept.get(allowed - 1) == "mapped"


def test_a_forked_process_begins_with_nothing_that_was_used_last() -> None:
    kept = LastUsed(100)
    kept.put("key", "value", 30)
    child = os.fork()
    if child == 0:
        os._exit(0 if kept.get("key") is None and kept.put("key", "own", 30) == kept.get("key") else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert kept.get("key") == "value"
