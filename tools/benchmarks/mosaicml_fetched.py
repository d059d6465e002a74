"""The bytes that MosaicML Streaming fetches with a cache for a part of the data; a program of its own environment.

Needs nothing but numpy and the package. It prints a line of JSON: the bytes fetched / the bytes of all shards.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

_PACKAGE = "mosaicml-streaming"
_BYTES_A_SAMPLE, _HEADER = 4, 1 << 10  # what the format needs in addition: an offset a sample, and a header


def written(shards: Path, target: Path) -> int:
    """Write the samples of .npy files as shards of equally many samples; returns the bytes of all shards."""
    streaming = importlib.import_module("streaming")
    paths = sorted(shards.glob("*.npy"))
    first = np.load(paths[0])
    size = first.nbytes + len(first) * _BYTES_A_SAMPLE + _HEADER
    columns = {"x": f"ndarray:{first.dtype}:{first.shape[1]}"}
    with streaming.MDSWriter(out=str(target), columns=columns, size_limit=size) as writer:
        for path in paths:
            for row in np.load(path):
                writer.write({"x": row})
    described = json.loads((target / "index.json").read_text())["shards"]
    assert len(described) == len(paths), f"{len(described)} shards, and {len(paths)} .npy files"
    return sum(shard["raw_data"]["bytes"] for shard in described)


def fetched(remote: Path, cache: Path, limit: int, epochs: int, batch: int, block: int) -> int:
    """The bytes of shards that are fetched in some epochs, which shuffle the samples of so many shards together.

    With the package's default, 2^18 samples, all shards would be in use at once, and each sample fetch one again.
    """
    streaming = importlib.import_module("streaming")
    sizes: list[int] = []

    class Counting(streaming.Stream):  # type: ignore[name-defined]
        def _download_file(self, *names: Any) -> str:
            path: str = super()._download_file(*names)
            sizes.append(os.path.getsize(path) if path.endswith(".mds") else 0)
            return path

    stream = Counting(remote=str(remote), local=str(cache))
    samples = json.loads((remote / "index.json").read_text())["shards"][0]["samples"]
    options = {"num_canonical_nodes": 1, "shuffle_block_size": block * samples, "batch_size": batch}
    dataset = streaming.StreamingDataset(streams=[stream], cache_limit=limit, shuffle=True, **options)
    for _ in range(epochs):
        assert sum(1 for _ in dataset) == len(dataset)
    return sum(sizes)


def main() -> None:
    """Measure with the arguments: folder to write to, folder of .npy files, part of the data, epochs, rows, block."""
    folder, shards = map(Path, sys.argv[1:3])
    part, numbers = float(sys.argv[3]), map(int, sys.argv[4:])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What the package prints is no answer.
    try:
        size = written(shards, folder / "remote")
        found: dict[str, Any] = {
            "answer": fetched(folder / "remote", folder / "cache", int(part * size), *numbers) / size
        }
    except ImportError as error:
        found = {"missing": f"{_PACKAGE} is not installed: {error}"}
    print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
