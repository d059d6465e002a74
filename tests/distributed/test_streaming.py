"""Streamed shards on two and four ranks: the batches of local files on one, with a cache that holds a part of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from libai_data.commands.index import main as index
from libai_data.data.samplers import CyclicSampler
from libai_data.data.sources import open_source
from tests.data.sources.object_store import BUCKET, ObjectStore
from tests.distributed.launcher import launch_ranks
from tests.properties import slowly

pyarrow = pytest.importorskip("pyarrow")
SCRIPT = Path(__file__).parent / "scripts" / "stream_shards.py"
FOLDER = f"s3://{BUCKET}/shards"


EACH = "every_rank,node,rank0"


@pytest.mark.parametrize(
    ("ranks", "meshes", "readers"), [(2, "2", "every_rank"), slowly(2, "2,1", EACH), slowly(4, "4,2", EACH)]
)
def test_ranks_stream_the_batches_of_local_files_and_resume(
    ranks: int, meshes: str, readers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs
    from pyarrow import parquet

    store = ObjectStore()
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        for name, value in {**store.environment(), "LIBAI_DATA_CACHE_DIR": str(tmp_path / "cache")}.items():
            monkeypatch.setenv(name, value)
        (tmp_path / "local").mkdir()
        for shard in range(20):
            path = tmp_path / "local" / f"{shard:02}.parquet"
            rows = [{"x": 8 * shard + row, "noise": np.random.default_rng(shard).bytes(900)} for row in range(8)]
            parquet.write_table(pyarrow.Table.from_pylist(rows), path, compression="none")
            store.put(f"shards/{path.name}", path.read_bytes())
        assert index([FOLDER]) == 0
        monkeypatch.setenv("LIBAI_DATA_CACHE_SIZE", str(18 * path.stat().st_size))
        result = launch_ranks(SCRIPT, ranks, FOLDER, str(tmp_path / "taken.json"), meshes, readers, timeout=200)
        assert result.returncode == 0, result.output
    finally:
        store.close()

    class Local:
        shard_lengths = open_source(tmp_path / "local").shard_lengths

        def __len__(self) -> int:
            return 160

    sampler = CyclicSampler(Local(), 8, shuffle=True, seed=3, lanes=4, block=2)
    expected = []
    for step in range(20):
        batch = sampler.batch_at(8 * step)
        assert batch is not None
        expected.append(batch.indices.tolist())
    for case, taken in json.loads((tmp_path / "taken.json").read_text()).items():
        assert taken == expected, case
