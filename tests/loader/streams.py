"""What the loader's tests compare: batches down to their bytes, and how many descriptors and processes there are."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from libai_data.data.samplers import CyclicSampler, SingleRoundSampler
from libai_data.loader import BatchLoader
from libai_data.structures import batch_info

Content = tuple[Any, dict[str, tuple[Any, ...]]]

THREAD_NAMES = ("libai_data worker ", "reads ", "send to node ", "receive from rank 0")
"""How the names of the threads begin that loaders start."""

WORKERS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 2, "worker_type": "thread"},
    {"num_workers": 2, "start_method": "fork"},
    {"num_workers": 2, "start_method": "spawn"},
]
"""One of each kind of loader."""

WORKER_NAMES = ["in-process", "thread", "fork", "spawn"]


def content(batch: Any) -> Content:
    """All that a trainer can see of a batch: its place in the stream, and dtype, shape, bytes and layout by field."""
    fields = {}
    for name, data in batch.get_fields().items():
        array = data.tensor.numpy()
        layout = (tuple(data.sbp_list), data.placement_idx)
        fields[name] = (str(data.tensor.dtype), array.shape, array.tobytes(), layout)
    return batch_info(batch), fields


@contextmanager
def loading(dataset: Any, sampler: Any = None, **arguments: Any) -> Iterator[BatchLoader]:
    """A loader over a dataset, in batches of 4 in the dataset's order unless there is a sampler, closed at the end."""
    loader = BatchLoader(dataset, sampler or CyclicSampler(dataset, 4), **arguments)
    try:
        yield loader
    finally:
        loader.close()


def stream(
    dataset: Any, sampler: Any = None, batches: int | None = None, state: Any = None, **arguments: Any
) -> list[Content]:
    """The contents of a loader's first batches; of all those of a round if no number is given."""
    sampler = sampler or (CyclicSampler(dataset, 4) if batches else SingleRoundSampler(dataset, 4))
    with loading(dataset, sampler, **arguments) as loader:
        if state is not None:
            loader.load_state_dict(state)
        return [content(batch) for batch in islice(iter(loader), batches)]


def worker_pids(loader: BatchLoader) -> list[int]:
    """Process ids of a loader's workers."""
    assert loader._reader is not None
    return list(loader._reader._executor.pids)  # type: ignore[attr-defined]


def descriptors() -> int:
    """How many descriptors this process has open."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def loader_threads() -> set[threading.Thread]:
    """The live threads that loaders have started; other threads may start and end meanwhile."""
    return {thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAMES)}


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
