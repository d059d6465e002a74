"""Tokenizing on a cluster, by tasks of Ray: the same parts become the same shards, whichever machine writes them."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from libai_data.data.text.parts import Part
from libai_data.data.text.shards import ShardReport, Task, TokenizingError, WriteShards, finished_shard, name_of
from libai_data.errors import installed

# If a process dies, Ray repeats its task, but only a few times.
_RETRIES = 2
# A network file system may show a new file this late.
_SECONDS_TO_APPEAR = 90.0


def tokenize_on_ray(
    folder: Path, parts: Iterable[Part], task: Task, workers: int
) -> Iterator[tuple[Part, ShardReport]]:
    """Write the shard of each part, on the machines of Ray; yields each part with its report, as soon as it is
    finished.

    If Ray runs in this process, it is used as it is. Otherwise, Ray is started. It then joins the cluster of
    `RAY_ADDRESS`, or the one on this machine, or begins one here; and it is shut down after the last shard. All
    machines must have the folder of the shards, the corpus and the tokenizer. `workers` counts the processes on all
    machines together; those for which Ray has processors run at once.

    Raises:
        ConfigError: Ray is not installed.
        TokenizingError: A process failed to tokenize a part, or the shard of a part did not appear on this machine.
    """
    ray = installed("ray", "cluster='ray'", "libai_data[cluster]")
    folder, own = folder.absolute(), not ray.is_initialized()
    if own:
        ray.init(log_to_driver=False)
    tokenize, run = ray.remote(num_cpus=1, max_retries=_RETRIES)(_tokenize), os.urandom(8)
    running: dict[Any, Part] = {}
    try:
        for part in parts:
            if len(running) == workers:
                yield _finished(ray, running, folder)
            running[tokenize.remote(part, folder, task, run, os.getcwd())] = part
        while running:
            yield _finished(ray, running, folder)
    finally:
        for each in running:
            ray.cancel(each)
        if own:
            ray.shutdown()


@lru_cache(maxsize=1)
def _writer_of(folder: Path, task: Task, run: bytes) -> WriteShards:
    """The writer for a run. Ray's processes stay for the next run, for which the tokenizer may have changed."""
    return WriteShards(folder, task)


def _tokenize(part: Part, folder: Path, task: Task, run: bytes, relative_to: str) -> tuple[ShardReport | None, str]:
    """Write a shard, in a process of the cluster; returns the report, or why there is none."""
    # If this machine has no such folder, only absolute paths work.
    with suppress(OSError):
        os.chdir(relative_to)
    # The tokenizers' own threads would make each process take all of its machine's processors.
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    try:
        return _writer_of(folder, task, run)(part), ""
    except Exception:
        return None, f"{os.uname().nodename}:\n{traceback.format_exc()}"


def _finished(ray: Any, running: dict[Any, Part], folder: Path) -> tuple[Part, ShardReport]:
    """Wait for a running task, and take it out of `running`."""
    (task, *_), _ = ray.wait([*running])
    part = running.pop(task)
    try:
        report, failure = ray.get(task)
    except ray.exceptions.RayError as error:
        raise TokenizingError(f"Ray gave up: {error}. What is finished is kept: run the same command again") from error
    if report is None:
        raise TokenizingError(f"{name_of(part)} failed on {failure}")
    # Another machine may have written the shard, and this machine may not see it yet.
    deadline = time.monotonic() + _SECONDS_TO_APPEAR
    while finished_shard(folder, part.number) is None:
        if time.monotonic() > deadline:
            raise TokenizingError(
                f"a process of the cluster has written shard {part.number}, but {folder} of this machine does not "
                "have it; let --output-prefix be on a file system that all machines share"
            )
        time.sleep(0.2)
    return part, report
