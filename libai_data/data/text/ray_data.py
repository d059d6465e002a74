"""Tokenizing on a cluster, by Ray Data: the same parts become the same shards, whichever machine writes them."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from libai_data.data.text.parts import Part
from libai_data.data.text.shards import ShardReport, Task, TokenizingError, WriteShards, finished_shard, name_of
from libai_data.errors import installed

# A process that dies is replaced, but only a few times.
_REPLACED: dict[str, Any] = {"max_restarts": 2, "max_task_retries": 2}
# A part of compressed files includes its text, which Ray keeps in memory until the part is tokenized.
_TEXT_AT_ONCE = 256 << 20
# A network file system may show a new file this late.
_SECONDS_TO_APPEAR = 90.0


def tokenize_on_ray(
    folder: Path, parts: Iterable[Part], task: Task, workers: int
) -> Iterator[tuple[Part, ShardReport]]:
    """Write the shard of each part, on the machines of Ray.

    If Ray runs in this process, it is used as it is. Otherwise, Ray is started. It then joins the cluster of
    `RAY_ADDRESS`, or the one on this machine, or begins one here; and it is shut down after the last shard.

    Args:
        folder: the folder of the shards; all machines must have this folder, the corpus and the tokenizer.
        workers: processes on all machines together; those for which Ray has processors run at once.

    Returns:
        Each part with its report, as soon as it is finished.

    Raises:
        ConfigError: Ray is not installed.
        TokenizingError: A process failed to tokenize a part, or the shard of a part did not appear on this machine.
    """
    ray = _ray()
    folder = folder.absolute()
    with _running(ray):
        for group in _in_groups(parts):
            yield from _on_cluster(ray, folder, group, task, workers)


class _Tokenizing:
    """Writes shards, in a process of the cluster."""

    def __init__(self, folder: Path, task: Task, relative_to: str) -> None:
        # If this machine has no such folder, only absolute paths work.
        with suppress(OSError):
            os.chdir(relative_to)
        # The tokenizers' own threads would make each process take all of its machine's processors.
        os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
        self._write = WriteShards(folder, task)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        import traceback

        part = pickle.loads(row["part"])
        try:
            report = self._write(part)
        except Exception:
            return {"number": part.number, "report": "", "failure": f"{os.uname().nodename}:\n{traceback.format_exc()}"}
        return {"number": part.number, "report": json.dumps(asdict(report)), "failure": ""}


def _on_cluster(
    ray: Any, folder: Path, parts: list[Part], task: Task, workers: int
) -> Iterator[tuple[Part, ShardReport]]:
    by_number = {part.number: part for part in parts}
    rows = ray.data.from_items([{"part": pickle.dumps(part)} for part in parts], override_num_blocks=len(parts))
    shards = rows.map(
        _Tokenizing,
        fn_constructor_args=(folder, task, os.getcwd()),
        concurrency=(1, workers),
        num_cpus=1,
        **_REPLACED,
    )
    try:
        for row in shards.iter_rows():
            part = by_number[row["number"]]
            if row["failure"]:
                raise TokenizingError(f"{name_of(part)} failed on {row['failure']}")
            _await_shard(folder, part)
            yield part, ShardReport(**json.loads(row["report"]))
    except ray.exceptions.RayError as error:
        raise TokenizingError(f"Ray gave up: {error}. What is finished is kept: run the same command again") from error


def _await_shard(folder: Path, part: Part) -> None:
    """Wait until this machine sees a shard that another one has written."""
    deadline = time.monotonic() + _SECONDS_TO_APPEAR
    while finished_shard(folder, part.number) is None:
        if time.monotonic() > deadline:
            raise TokenizingError(
                f"a process of the cluster has written shard {part.number}, but {folder} of this machine does not "
                "have it; let --output-prefix be on a file system that all machines share"
            )
        time.sleep(0.2)


def _in_groups(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """The parts in groups, each with about as much text as Ray may keep in memory."""
    group: list[Part] = []
    size = 0
    for part in parts:
        group.append(part)
        size += sum(len(piece.data or b"") for piece in part.pieces)
        if size >= _TEXT_AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


@contextmanager
def _running(ray: Any) -> Iterator[None]:
    """Run Ray within the block, with as little output on the console as possible."""
    own = not ray.is_initialized()
    if own:
        ray.init(log_to_driver=False)
    context = ray.data.DataContext.get_current()
    shown: tuple[bool, bool] = context.enable_progress_bars, context.print_on_execution_start
    context.enable_progress_bars = context.print_on_execution_start = False
    try:
        yield
    finally:
        context.enable_progress_bars, context.print_on_execution_start = shown
        if own:
            ray.shutdown()


def _ray() -> Any:
    for package in ("ray.data", "ray.exceptions"):
        installed(package, "cluster='ray'", "libai_data[cluster]")
    return installed("ray", "cluster='ray'", "libai_data[cluster]")
